#!/usr/bin/env python3
"""What the service costs over the bare engine.

In each round a fresh service (control plane, worker, gateway) serves a closed loop of clients while a
forwarder before the worker writes its plans down. Then the service is stopped and a process of its own
runs the same plans on the same engine, without sockets. Overhead is the time from the first request to
the end of the last, over the time of the replay, minus one. Its parts:

- slower engine: the same plans took the worker longer than the replay, since others use the cores too;
- waiting engine: the worker had no plan to run.

    python bench/replay.py --lengths lengths.csv --max-total 512 --clients 16 --requests 32 --rounds 3

All options of `octavo serve` apply, except ports.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from loadgen.drive import Run, closed_loop, warm_up
from loadgen.http_client import HttpClient
from loadgen.lengths import InputError
from loadgen.options import add_lengths, integer, length_source, number
from loadgen.records import RequestError
from loadgen.workload import ArrivalSpec, make_requests
from measure.figures import number as shown
from measure.figures import table
from measure.machine import describe, write_json
from measure.processes import StartError, running, stop_on_sigterm
from measure.recording import Forwarder, Recording, RecordingError
from measure.services import Ports, add_service_options, service_parts, worker_options

from octavo.common.options import OptionError, to_arguments
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.worker import yield_idle_cores

_REPLAY = Path(__file__).with_name("replay_engine.py")
_TIMEOUT = 600.0  # seconds, of a start and of a request


@dataclass(frozen=True)
class Round:
    """One run of the service and the replay of its plans; times in seconds."""

    service: float
    replay: float
    computing: float  # of `service`, while the worker ran plans
    plans: int
    tokens: int  # drawn, those of the warm-up included
    different_tokens: int  # drawn otherwise by the replay

    @property
    def overhead(self) -> float:
        return self.service / self.replay - 1

    @property
    def slower_engine(self) -> float:
        """The part of `overhead` by which the same plans took longer in the service."""
        return (self.computing - self.replay) / self.replay

    @property
    def waiting_engine(self) -> float:
        """The part of `overhead` in which the worker ran no plan."""
        return (self.service - self.computing) / self.replay


def main() -> int:
    options = _parser().parse_args()
    stop_on_sigterm()
    yield_idle_cores()  # for the worker and the replay alike: both inherit the environment
    try:
        rounds = [_round(options, number) for number in range(options.rounds)]
    except (InputError, OptionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (StartError, RequestError, RecordingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_text(rounds))
    if options.json:
        report = {"rounds": [asdict(each) | {"overhead": each.overhead} for each in rounds]}
        write_json(options.json, describe(report, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=integer(1), default=3, help="default: 3")
    parser.add_argument("--clients", type=integer(1), default=16, help="default: 16")
    parser.add_argument("--requests", type=integer(1), default=32, help="default: 32")
    parser.add_argument("--warmup", type=integer(0), default=8, help="requests (default: 8)")
    parser.add_argument("--temperature", type=number(0), default=0.0, help="default: 0, greedy")
    add_lengths(parser)
    parser.add_argument("--vocab", type=integer(21), default=49152, help="default: 49152")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    add_service_options(parser)
    return parser


def _round(options: argparse.Namespace, number: int) -> Round:
    with _service(options) as (url, forwarder):
        wall = uvloop.run(_load(options, url, forwarder, number))
        recording = forwarder.stop()
    found = _replay(recording, worker_options(options))
    result = Round(
        service=wall,
        replay=found["seconds"],
        computing=found["recorded_seconds"],
        plans=found["plans"],
        tokens=found["tokens"],
        different_tokens=found["different_tokens"],
    )
    print(f"round {number + 1}: overhead {result.overhead:.1%}", file=sys.stderr, flush=True)
    return result


@contextlib.contextmanager
def _service(options: argparse.Namespace) -> Iterator[tuple[str, Forwarder]]:
    """The three processes on free ports, with a forwarder before the worker."""
    ports = Ports.free()
    forwarder = Forwarder(ports.workers)
    forwarder.start()
    with contextlib.ExitStack() as stack:
        stack.callback(forwarder.stop)
        for part in service_parts(options, ports, worker_connects_to=forwarder.port):
            process = stack.enter_context(running(f"octavo {part.name}", part.command))
            process.wait_for(part.port, part.path, _TIMEOUT)
        yield f"http://127.0.0.1:{ports.http}", forwarder


async def _load(options: argparse.Namespace, url: str, forwarder: Forwarder, number: int) -> float:
    """Seconds of the measured run. Raises RequestError when a request fails."""
    client = HttpClient(url, "completions", None, options.temperature, {})
    await warm_up(client, options.warmup, options.vocab, [options.seed, number, 0], _TIMEOUT)
    source = length_source(options)
    seed = [options.seed, number, 1]
    run = Run(make_requests(source, ArrivalSpec(), options.requests, options.vocab, seed))
    forwarder.mark()
    await closed_loop(client, run, options.clients, _TIMEOUT)
    for record in run.records:
        if record.failure:
            raise record.failure
    return run.wall


def _replay(recording: Recording, worker: WorkerOptions) -> dict[str, Any]:
    """What `replay_engine.py` prints. Raises RecordingError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plans"
        recording.save(file)
        command = [sys.executable, str(_REPLAY), str(file), *to_arguments(worker)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=10 * _TIMEOUT)
    if done.returncode:
        raise RecordingError("the replay failed; its own words are above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _text(rounds: Sequence[Round]) -> str:
    header = ["round", "service s", "replay s", "overhead", "slower engine", "waiting engine", "plans"]
    rows = [
        [
            str(number + 1),
            shown(each.service),
            shown(each.replay),
            *(f"{part:.1%}" for part in (each.overhead, each.slower_engine, each.waiting_engine)),
            str(each.plans),
        ]
        for number, each in enumerate(rounds)
    ]
    overhead = statistics.median(each.overhead for each in rounds)
    different, tokens = (
        sum(each.different_tokens for each in rounds),
        sum(each.tokens for each in rounds),
    )
    return (
        f"{table(header, rows)}\nmedian overhead {overhead:.1%}; "
        f"{different} of {tokens} tokens differ in the replays"
    )


if __name__ == "__main__":
    sys.exit(main())
