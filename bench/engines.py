#!/usr/bin/env python3
"""Several engines in one process, in turns: milliseconds per decode step and per prefill.

Machines drift, so engines are compared within the same minutes: each round measures every step of each
engine. Options of an engine are those of `octavo worker`.

    python bench/engines.py --rounds 3 --json engines.json
"""

import argparse
import statistics
import sys

from loadgen.options import integer, integers
from measure.engines import make_engine, parse_engine_options
from measure.figures import number, table
from measure.machine import describe, write_json
from measure.stepping import Shape, Stepper

from octavo.common.modelfiles import ModelError
from octavo.common.options import OptionError
from octavo.dataplane.engine import EngineError

_WARMUP_STEPS = 4
_VARIANTS = {
    "native, 4-bit": "--engine torch --kernels native --quantization exact4",
    "OpenVINO, 4-bit": "--engine openvino --quantization exact4",
    "native, float32": "--engine torch --kernels native --quantization none",
    "OpenVINO, float32": "--engine openvino --quantization none",
    "native, 4-bit, int16": "--engine torch --kernels native --quantization exact4 --activations int16",
    "native, 4-bit, int8": "--engine torch --kernels native --quantization exact4 --activations int8",
}

Times = dict[str, dict[str, list[float]]]  # seconds of each step, by engine and kind of step


def main() -> int:
    options = _parser().parse_args()
    chosen = dict(text.split("=", 1) for text in options.variant) if options.variant else _VARIANTS
    try:
        steppers = {name: _stepper(text, options) for name, text in chosen.items()}
    except (ModelError, EngineError, OptionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    times: Times = {name: {} for name in steppers}
    for _ in range(options.rounds):
        for name, stepper in steppers.items():
            _measure(stepper, options, times[name])
    print(_text(times))
    if options.json:
        write_json(options.json, describe({"seconds": times, "variants": chosen}, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Engines in turns, in one process.")
    parser.add_argument(
        "--variant", action="append", metavar="NAME=OPTIONS", help="default: all on CPUs"
    )
    parser.add_argument("--rounds", type=integer(1), default=3, help="default: 3")
    parser.add_argument("--batches", type=integers, default=[1, 4, 16, 64], metavar="1,4,16,64")
    parser.add_argument("--context", type=integer(1), default=150, help="tokens before a step")
    parser.add_argument("--prefill", type=integer(2), default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=integer(1), default=18, help="of each round (default: 18)")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


def _stepper(text: str, options: argparse.Namespace) -> Stepper:
    files, engine = make_engine(parse_engine_options(text))
    longest = max(options.prefill, options.context + options.steps + _WARMUP_STEPS) + 2
    shape = Shape(max(options.batches), longest, engine.describe().preferred_block_size)
    return Stepper(files, engine, shape, seed=1)


def _measure(stepper: Stepper, options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    for batch in options.batches:
        stepper.spread(batch, options.context)
        found = [stepper.decode(batch) for _ in range(options.steps + _WARMUP_STEPS)]
        times.setdefault(f"decode {batch} x {options.context}", []).extend(found[_WARMUP_STEPS:])
    found = [stepper.prefill(options.prefill) for _ in range(4)]
    times.setdefault(f"prefill {options.prefill}", []).extend(found[1:])


def _text(times: Times) -> str:
    steps = next(iter(times.values()))
    rows = [
        [
            step,
            *(f"{_ms(statistics.median(own[step]))} ({_ms(min(own[step]))})" for own in times.values()),
        ]
        for step in steps
    ]
    return table(["ms: median (fastest)", *times], rows)


def _ms(seconds: float) -> str:
    return number(seconds * 1000)


if __name__ == "__main__":
    sys.exit(main())
