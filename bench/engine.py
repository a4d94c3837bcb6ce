#!/usr/bin/env python3
"""Measures the engine of a worker alone: milliseconds per decode step and per prefill.

Each figure stands beside the floor that the machine sets: the larger of the step's arithmetic at the
speed of torch's fastest fp32 matrix product and its reads at the speed of a memory copy, both measured
in the same run.

    python bench/engine.py --batches 1,4,16,32,64 --context 256 --prefill 512 --json engine.json
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass

import torch
from measure.ceilings import Ceilings, ModelCost, measure_ceilings
from measure.figures import number, table
from measure.machine import describe, write_json
from measure.stepping import Shape, Stepper

from octavo.common.modelfiles import ModelError, ModelFiles, open_model

_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Figure:
    """One measured step."""

    name: str
    tokens: int  # computed by a step
    seconds: float  # median over the steps
    fastest: float
    floor: float  # seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    options = _parser().parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        files = open_model(options.model)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    figures = _measure(files, options, ceilings)
    print(_text(figures, ceilings))
    if options.json:
        found = {"ceilings": asdict(ceilings), "figures": [asdict(figure) for figure in figures]}
        write_json(options.json, describe(found, {**vars(options), "threads": torch.get_num_threads()}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Decode and prefill steps of the engine alone.")
    parser.add_argument("--model", default="demo", help="as in `octavo worker` (default: demo)")
    parser.add_argument("--batches", type=_counts, default=[1, 4, 16, 32, 64], metavar="1,4,16,32,64")
    parser.add_argument(
        "--context", type=_count, default=256, help="tokens before a step (default: 256)"
    )
    parser.add_argument("--prefill", type=_count, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--steps", type=_count, default=12, help="measured, each (default: 12)")
    parser.add_argument("--block-size", type=_count, default=16, help="tokens (default: 16)")
    parser.add_argument("--threads", type=_count, help="of torch (default: its own choice)")
    parser.add_argument(
        "--seed", type=_count, default=1, help="of tokens and block tables (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


def _measure(files: ModelFiles, options: argparse.Namespace, ceilings: Ceilings) -> list[Figure]:
    steps = options.steps + _WARMUP_STEPS
    longest = max(options.prefill + 1, options.context + 2 + steps)
    stepper = Stepper(files, Shape(max(options.batches), longest, options.block_size), options.seed)
    cost = ModelCost.of(files.config, stepper.token_bytes)
    figures = []
    for batch in options.batches:
        stepper.spread(batch, options.context)
        times = [stepper.decode(batch) for _ in range(steps)][_WARMUP_STEPS:]
        attended = batch * (options.context + steps // 2)
        floor = cost.floor(cost.flops(batch, batch, attended), cost.bytes_read(attended), ceilings)
        figures.append(_figure(f"decode {batch} x {options.context}", batch, times, floor))
    tokens = options.prefill
    times = [stepper.prefill(tokens) for _ in range(max(3, options.steps // 3) + 1)][1:]
    flops = cost.flops(tokens, 1, tokens * (tokens + 1) // 2)
    floor = cost.floor(flops, cost.bytes_read(tokens), ceilings)
    return [*figures, _figure(f"prefill {tokens}", tokens, times, floor)]


def _figure(name: str, tokens: int, times: list[float], floor: float) -> Figure:
    print(f"{name}: {statistics.median(times) * 1000:.1f} ms", file=sys.stderr, flush=True)
    return Figure(name, tokens, statistics.median(times), min(times), floor)


def _text(figures: list[Figure], ceilings: Ceilings) -> str:
    header = ["step (sequences x context)", "ms", "fastest", "floor ms", "floor / ms", "tokens/s"]
    rows = [
        [
            figure.name,
            *(number(value * 1000) for value in (figure.seconds, figure.fastest, figure.floor)),
            f"{figure.floor / figure.seconds:.0%}",
            number(figure.tokens_per_second),
        ]
        for figure in figures
    ]
    limits = (
        f"ceilings, {torch.get_num_threads()} threads: fp32 matrix product "
        f"{ceilings.matmul_flops / 1e9:.0f} GFLOP/s, memory copy {ceilings.copy_bytes / 1e9:.1f} GB/s"
    )
    return "\n".join([table(header, rows), limits])


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return value


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
