#!/usr/bin/env python3
"""Microseconds per running sequence per iteration of the control plane's whole path.

One iteration is what the server does between two results: schedule, pack the plan, unpack the result's
bytes, process them, pack the gateway's message. No worker runs: the result is made beforehand, outside
the clock. Requests are taken in between iterations, while a real gang computes; the last column says
what one of them costs. A fixed loop of plain Python is timed beside it, since machines differ.

    python bench/scheduler.py --sequences 64,256,1024,4096 --json scheduler.json
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from typing import Any

import numpy as np
from measure.figures import number, table
from measure.machine import describe, write_json

from octavo.controlplane.counters import Counters
from octavo.controlplane.draft import Shape
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import OrderedGroups, SequenceGroup
from octavo.proto.plan import Plan, Result, Sampling
from octavo.proto.session import SampleState, Submit
from octavo.proto.wire import int32s

_EOS = 2
_PROMPT = 32  # tokens
_LONGEST = 2048  # tokens


class Bench:
    """A scheduler with `running` decodes, refilled with as many arrivals as there are departures."""

    def __init__(self, running: int, churn: float, index: bool) -> None:
        self.running, self.churn, self.index = running, churn, index
        self.chance = random.Random(0)
        self.waiting = OrderedGroups()
        self.scheduler = Scheduler(self._shape(running), self.waiting, Counters())
        self.request = 0
        self.rows = 0
        self.submissions: list[float] = []  # seconds that each request took to be queued

    def _shape(self, running: int) -> Shape:
        slots = running + max(8, running // 4)
        return Shape(
            epoch=1,
            block_size=16,
            num_blocks=slots * _LONGEST // 16,
            num_cpu_blocks=0,
            num_slots=slots,
            max_model_len=_LONGEST,
            max_batched_tokens=slots * _PROMPT,
            prefill_chunk=_PROMPT,
            watermark=0.01,
            prefix_caching=self.index,
        )

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.request += 1
            # With churn a sequence lives 1 / churn iterations, staggered at the start.
            length = round(1 / self.churn) if self.churn else _LONGEST
            if self.churn and self.request <= self.running:
                length = self.chance.randint(1, length)
            submit = Submit(
                gateway=1,
                request=self.request,
                attempt=0,
                arrival=float(self.request),
                priority=0,
                prompt=int32s(self.chance.choices(range(3, 40_000), k=_PROMPT)),
                samples=[SampleState()],
                max_tokens=length,
                sampling=Sampling(seed=self.request, eos_token_ids=int32s([_EOS])),
            )
            start = time.perf_counter()
            group = SequenceGroup.from_submit(submit, self.request)
            reason = self.scheduler.fit(group)
            self.waiting.add(group)
            self.submissions.append(time.perf_counter() - start)
            assert reason is None, reason

    def iterate(self) -> float:
        """One iteration; returns its seconds, arrivals and the making of the result left out."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan is not None
        plan.pack()
        spent = time.perf_counter() - start
        frame = self._result(plan)
        start = time.perf_counter()
        outputs = self.scheduler.process(Result.unpack(frame))
        for _, message in outputs.token_messages(1):
            message.pack()
        spent += time.perf_counter() - start
        self.rows = len(plan.decode_slots) + len(plan.draw_slots)
        if self.churn:
            self.arrive(len(outputs.ended))
        return spent

    def _result(self, plan: Plan) -> bytes:
        draws = len(plan.decode_slots) + len(plan.draw_slots)
        tokens = np.full(draws, 7, dtype=np.int32)  # never the EOS: lengths decide who ends
        return Result(epoch=1, number=plan.number, rank=0, tokens=tokens).pack()


def measure(running: int, churn: float, index: bool, iterations: int) -> tuple[float, float]:
    """Medians in microseconds: of an iteration per row, and of a submission."""
    bench = Bench(running, churn, index)
    bench.arrive(running)
    for _ in range(5):
        bench.iterate()
    rows = [1e6 * bench.iterate() / max(bench.rows, 1) for _ in range(iterations)]
    return statistics.median(rows), 1e6 * statistics.median(bench.submissions)


def calibrate() -> float:
    """Nanoseconds of one step of a plain Python loop."""
    steps, total = 200_000, 0
    start = time.perf_counter()
    for step in range(steps):
        total += step & 7
    return 1e9 * (time.perf_counter() - start) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", default="64,256,1024,4096", help="running decodes")
    parser.add_argument("--churn", type=float, default=0.1, help="share that ends per iteration")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for running in map(int, options.sequences.split(",")):
        for churn, index in itertools.product((0.0, options.churn), (False, True)):
            rounds = [measure(running, churn, index, options.iterations) for _ in range(options.rounds)]
            case = {"running": running, "churn": churn, "index": index}
            iterations, submissions = zip(*rounds, strict=True)
            figures.append(case | {"microseconds": iterations, "submission_microseconds": submissions})
    loop = statistics.median(calibrate() for _ in range(options.rounds))
    rows = [
        [
            str(f["running"]),
            f"{f['churn']:.0%}",
            "on" if f["index"] else "off",
            number(statistics.median(f["microseconds"])),
            number(statistics.median(f["submission_microseconds"])),
        ]
        for f in figures
    ]
    heads = [
        "running",
        "arrive and end",
        "prefix index",
        "us / sequence / iteration",
        "us / submission",
    ]
    print(table(heads, rows))
    print(f"a step of a plain Python loop takes {loop:.1f} ns here")
    if options.json:
        report = {"figures": figures, "loop_nanoseconds": loop}
        write_json(options.json, describe(report, vars(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
