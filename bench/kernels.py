#!/usr/bin/env python3
"""Each operation of the kernels' table on this CPU: time, GB/s and GFLOP/s, beside the CPU's limits.

The last column is the time that the operation would take at the speed of memory or of the fastest fp32
matrix product here, whichever is longer, over the time that it took; both limits are measured
in the same run. What fits a processor's cache can exceed the limit of memory. Operations on little
data are bound by the time of a call, so their microseconds say more.

    python bench/kernels.py --json kernels.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from loadgen.options import integer, integers
from measure.ceilings import Ceilings, limits_text, measure_ceilings
from measure.figures import number, table
from measure.kernel_cases import Case, Load, Sizes, cases
from measure.machine import describe, write_json

from octavo.common.modelfiles import ModelError, open_model
from octavo.dataplane.engines.choice import available_cpus, set_compute_threads
from octavo.kernels.table import CPU, REFERENCE, kernels_named

_TABLES = {
    "native": lambda: kernels_named("native", "cpu"),
    "torch": lambda: CPU,
    "reference": lambda: REFERENCE,
}
_LOOP_SECONDS = 0.01  # of one measurement at least, so that the clock's own cost is nothing


@dataclass(frozen=True)
class Figure:
    """One operation at one size."""

    operation: str
    size: str
    seconds: float  # median
    bytes: int
    flops: int

    def share(self, ceilings: Ceilings) -> float | None:
        """Of the machine's limit that was reached; None for operations that only arrange indices."""
        floor = max(self.bytes / ceilings.memory_bytes, self.flops / ceilings.matmul_flops)
        return floor / self.seconds if floor else None


def main() -> int:
    options = _parser().parse_args()
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        sizes = Sizes.of(open_model(options.model).config)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    figures = _measure(sizes, options)
    print(_text(figures, ceilings))
    if options.json:
        found = {
            "sizes": asdict(sizes),
            "ceilings": asdict(ceilings),
            "figures": [asdict(f) | {"share": f.share(ceilings)} for f in figures],
        }
        write_json(options.json, describe(found, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo", help="whose sizes (default: demo)")
    parser.add_argument("--implementation", choices=tuple(_TABLES), default="native")
    parser.add_argument("--only", metavar="OPERATION", action="append", help="default: all")
    parser.add_argument("--batches", type=integers, default=[1, 16, 64], metavar="1,16,64")
    parser.add_argument("--context", type=integer(1), default=256, help="tokens of a decode's sequence")
    parser.add_argument("--prefill", type=integer(2), default=512, help="tokens of a chunk")
    parser.add_argument("--block-size", type=integer(1), default=16, help="default: 16")
    parser.add_argument("--repeats", type=integer(1), default=15, help="of which the median counts")
    parser.add_argument("--threads", type=integer(1), help="default: all CPUs")
    parser.add_argument("--seed", type=integer(0), default=1, help="of all values")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


@torch.inference_mode()
def _measure(sizes: Sizes, options: argparse.Namespace) -> list[Figure]:
    kernels = _TABLES[options.implementation]()
    set_compute_threads(kernels, options.threads or available_cpus())
    load = Load(options.batches, options.context, options.prefill, options.block_size)
    figures = []
    for case in cases(kernels, sizes, load):
        if options.only and case.operation not in options.only:
            continue
        seconds = _seconds(case, options.repeats)
        figures.append(Figure(case.operation, case.size, seconds, case.bytes, case.flops))
    return sorted(figures, key=lambda figure: figure.operation)


def _seconds(case: Case, repeats: int) -> float:
    """Median over repeats of the mean over a loop."""
    case.run(0)
    loops = max(1, round(_LOOP_SECONDS / max(_loop(case, 0, 2), 1e-7)))
    return statistics.median(_loop(case, turn * loops, loops) for turn in range(repeats))


def _loop(case: Case, first: int, count: int) -> float:
    started = time.perf_counter()
    for turn in range(first, first + count):
        case.run(turn)
    return (time.perf_counter() - started) / count


def _text(figures: Sequence[Figure], ceilings: Ceilings) -> str:
    header = ["operation", "size", "us", "GB/s", "GFLOP/s", "of the limit"]
    rows = []
    for figure in figures:
        share = figure.share(ceilings)
        rows.append(
            [
                figure.operation,
                figure.size,
                number(figure.seconds * 1e6),
                number(figure.bytes / figure.seconds / 1e9) if figure.bytes else "-",
                number(figure.flops / figure.seconds / 1e9) if figure.flops else "-",
                "-" if share is None else f"{share:.0%}",
            ]
        )
    return "\n".join([table(header, rows), limits_text(ceilings)])


if __name__ == "__main__":
    sys.exit(main())
