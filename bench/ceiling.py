#!/usr/bin/env python3
"""The most output tokens/s that a machine allows under a closed loop of clients, whoever serves.

A step computes one token of every running request and the prompts of those that have just come. It
takes at least as long as its arithmetic at the speed of the fastest matrix product found here, and as
its reads (all weights once, and the KV cache of every running request) at the speed of memory; both are
measured in the same run. Nothing else is counted: no arithmetic of attention, no overhead, no waiting.
The requests are those of `bench/peers.py` with the same options.

    python bench/ceiling.py --lengths lengths.csv --max-total 512 --sweep-requests 16,12,24,64
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from loadgen import options as checks
from loadgen.lengths import InputError, Lengths
from loadgen.workload import ArrivalSpec, make_requests
from measure.ceilings import Ceilings, ModelCost, limits_text, measure_ceilings
from measure.figures import number, table
from measure.machine import describe, write_json

from octavo.common.modelfiles import ModelError, open_model


def main() -> int:
    options = _parser().parse_args()
    try:
        model = open_model(options.model)
        ceilings = measure_ceilings()
        cost = ModelCost.of(model.config)
        rates = {
            size: _rates(options, replace(cost, weight_bytes=size), ceilings)
            for size in options.weight_bytes
        }
    except (ModelError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_text(rates, options.sweep, ceilings))
    if options.json:
        found = {"ceilings": asdict(ceilings), "output_tokens_per_second": rates}
        write_json(options.json, describe(found, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo", help="of the Llama family (default: demo)")
    parser.add_argument(
        "--weight-bytes",
        type=_sizes,
        default=[4.0],
        metavar="4,0.71",
        help="of each weight (default: 4)",
    )
    checks.add_closed_loops(parser)
    parser.add_argument("--rounds", type=checks.integer(1), default=3, help="of requests (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


def _rates(options: argparse.Namespace, cost: ModelCost, ceilings: Ceilings) -> list[float]:
    """Output tokens per second at each point of the sweep, the median of all rounds."""
    return [
        statistics.median(
            _rate(
                _lengths(options, point.requests, number, index),
                point.clients or 1,
                cost,
                ceilings,
            )
            for number in range(options.rounds)
        )
        for index, point in enumerate(checks.closed_loops(options))
    ]


def _sizes(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _lengths(options: argparse.Namespace, count: int, number: int, index: int) -> list[Lengths]:
    """Those of the requests of `bench/peers.py` in round `number` at point `index`."""
    source = checks.length_source(options)
    requests = make_requests(source, ArrivalSpec(), count, 1000, [options.seed, number, index])
    return [Lengths(len(request.prompt), request.output_tokens) for request in requests]


def _rate(requests: Sequence[Lengths], clients: int, cost: ModelCost, ceilings: Ceilings) -> float:
    """Output tokens per second."""
    waiting, running, seconds = list(requests), list[list[int]](), 0.0
    while waiting or running:
        come, waiting = waiting[: clients - len(running)], waiting[clients - len(running) :]
        running += [[request.prompt, request.output] for request in come]
        computed = len(running) - len(come) + sum(request.prompt for request in come)
        flops = cost.flops(computed, len(running), attended=0)
        seconds += cost.floor(flops, cost.bytes_read(sum(cached for cached, _ in running)), ceilings)
        running = [[cached + 1, left - 1] for cached, left in running if left > 1]
    return sum(request.output for request in requests) / seconds


def _text(rates: dict[float, list[float]], sweep: Sequence[int], ceilings: Ceilings) -> str:
    header = ["bytes of a weight", *(f"{clients} clients" for clients in sweep)]
    rows = [[f"{size:g}", *(number(rate) for rate in found)] for size, found in rates.items()]
    return f"output tokens/s at most\n{table(header, rows)}\n{limits_text(ceilings)}"


if __name__ == "__main__":
    sys.exit(main())
