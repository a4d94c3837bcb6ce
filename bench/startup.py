#!/usr/bin/env python3
"""Starts each kind of process and prints the time until it is ready and its memory then.

The control plane counts as started when /health answers (it is ready only with a worker), worker and
gateway when /ready does. Each starts while the ones before it are up and idle, from a warm file cache
in all rounds but perhaps the first.

    python bench/startup.py --rounds 3 --json startup.json

With --ranks it loads the demo model in gangs of those sizes instead, from each form of --forms, and
prints the seconds until the gang is ready, with the most memory that each rank had resident.

    python bench/startup.py --ranks 1 3 --forms gguf safetensors --engine torch --json ranks.json

All options of `octavo serve` apply, except ports.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.figures import number, table
from measure.gangs import GangStart, forms_of, start_gang
from measure.machine import describe, write_json
from measure.processes import StartError, running, stop_on_sigterm
from measure.services import Ports, add_service_options, service_parts

from octavo.common.options import OptionError

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Start:
    """One start of one process."""

    name: str
    seconds: float
    resident_bytes: int


def main() -> int:
    options = _parser().parse_args()
    stop_on_sigterm()
    try:
        return _of_gangs(options) if options.ranks else _of_processes(options)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _of_processes(options: argparse.Namespace) -> int:
    rounds = [_round(options, index) for index in range(options.rounds)]
    figures = [_median(starts) for starts in zip(*rounds, strict=True)]
    print(table(["process", "seconds to start", "fastest", "slowest", "resident MiB"], _rows(figures)))
    if options.json:
        report = {"processes": figures, "rounds": [[asdict(start) for start in r] for r in rounds]}
        write_json(options.json, describe(report, vars(options)))
    return 0


def _of_gangs(options: argparse.Namespace) -> int:
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        for form, model in forms_of(options.forms, Path(folder)).items():
            for ranks in options.ranks:
                rounds = [start_gang(options, form, model, ranks) for _ in range(options.rounds)]
                starts.append(rounds)
                print(f"{form}, {ranks} ranks: done", file=sys.stderr, flush=True)
    header = ["model and ranks", "seconds to ready", "fastest", "slowest", "peak MiB of each rank"]
    print(table(header, [_gang_row(rounds) for rounds in starts]))
    if options.json:
        report = {"gangs": [[asdict(start) for start in rounds] for rounds in starts]}
        write_json(options.json, describe(report, vars(options)))
    return 0


def _gang_row(rounds: Sequence[GangStart]) -> list[str]:
    seconds = [start.seconds for start in rounds]
    figures = (statistics.median(seconds), min(seconds), max(seconds))
    peaks = zip(*(start.peak_bytes for start in rounds), strict=True)
    mebibytes = " ".join(number(statistics.median(peak) / _MIB) for peak in peaks)
    return [f"{rounds[0].form} {rounds[0].ranks}", *map(number, figures), mebibytes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Start-up time and memory of Octavo's processes.")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=3, metavar="N")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for a start (default: 300)"
    )
    parser.add_argument("--ranks", type=int, choices=range(1, 65), nargs="+", metavar="T")
    parser.add_argument(
        "--forms", choices=("gguf", "safetensors"), nargs="+", default=["gguf", "safetensors"]
    )
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    add_service_options(parser)
    return parser


def _round(options: argparse.Namespace, index: int) -> list[Start]:
    """Starts the three, one after the other, and stops them again. Raises StartError."""
    starts = []
    with contextlib.ExitStack() as stack:
        for part in service_parts(options, Ports.free()):
            process = stack.enter_context(running(f"octavo {part.name}", part.command))
            seconds = process.wait_for(part.port, part.path, options.timeout)
            starts.append(Start(part.name, seconds, process.resident_bytes()))
            print(f"round {index + 1}: {part.name} {seconds:.2f} s", file=sys.stderr, flush=True)
    return starts


def _median(starts: Sequence[Start]) -> dict[str, Any]:
    seconds = [start.seconds for start in starts]
    return {
        "name": starts[0].name,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "resident_bytes": statistics.median(start.resident_bytes for start in starts),
    }


def _rows(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            figure["name"],
            *(number(figure[key]) for key in ("seconds", "fastest", "slowest")),
            number(figure["resident_bytes"] / _MIB),
        ]
        for figure in figures
    ]


if __name__ == "__main__":
    sys.exit(main())
