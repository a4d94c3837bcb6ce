#!/usr/bin/env python3
"""Measures the engine of a worker alone: milliseconds per decode step and per prefill.

Each figure stands beside the floor that the machine sets: the larger of the step's arithmetic at the
speed of the fastest fp32 matrix product here and its reads at the speed of memory, both measured in the
same run. The floor counts weights of four bytes, whatever the engine reads.

    python bench/engine.py --batches 1,4,16,32,64 --context 256 --prefill 512 --json engine.json
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass

import torch
from measure.ceilings import Ceilings, ModelCost, limits_text, measure_ceilings
from measure.engines import add_engine_options, engine_options, make_engine
from measure.figures import number, table
from measure.machine import describe, write_json
from measure.stepping import Shape, Stepper

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.common.options import OptionError
from octavo.dataplane.engine import Engine, EngineError

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
    try:
        if options.threads:
            torch.set_num_threads(options.threads)
        ceilings = measure_ceilings()  # first: an engine may leave torch fewer threads
        files, engine = make_engine(engine_options(options))
        figures = _measure(files, engine, options, ceilings)
    except (ModelError, EngineError, OptionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_text(figures, ceilings))
    if options.json:
        found = {"ceilings": asdict(ceilings), "figures": [asdict(figure) for figure in figures]}
        found["engine"] = asdict(engine.describe())
        write_json(options.json, describe(found, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Decode and prefill steps of the engine alone.")
    parser.add_argument("--batches", type=_counts, default=[1, 4, 16, 32, 64], metavar="1,4,16,32,64")
    parser.add_argument(
        "--context", type=_count, default=256, help="tokens before a step (default: 256)"
    )
    parser.add_argument("--prefill", type=_count, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--steps", type=_count, default=12, help="measured, each (default: 12)")
    parser.add_argument("--block-size", type=_count, help="tokens (default: what the engine prefers)")
    parser.add_argument(
        "--seed", type=_count, default=1, help="of tokens and block tables (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    add_engine_options(parser)
    return parser


def _measure(
    files: ModelFiles, engine: Engine, options: argparse.Namespace, ceilings: Ceilings
) -> list[Figure]:
    steps = options.steps + _WARMUP_STEPS
    longest = max(options.prefill + 1, options.context + 2 + steps)
    block_size = options.block_size or engine.describe().preferred_block_size
    shape = Shape(max(options.batches), longest, block_size)
    stepper = Stepper(files, engine, shape, options.seed)
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
    return "\n".join([table(header, rows), limits_text(ceilings)])


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return value


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
