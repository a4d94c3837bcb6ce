"""``python -m octavo.kernels.check``: registers, spills, shared memory and matrix instructions."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from octavo.kernels.check.report import Record, line, markdown


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 where something must not be as it is."""
    options = _parse(arguments)
    # Kernels compile only where they are not interpreted; triton reads this when it is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    begin = time.perf_counter()
    records = []
    for record in _run(options):
        print(line(record), flush=True)
        records.append(record)
    faults = [record for record in records if record["faults"]]
    seconds = time.perf_counter() - begin
    print(f"{len(records)} kernels compiled in {seconds:.0f} s, {len(faults)} with faults")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(records))
    return 1 if faults or not records else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m octavo.kernels.check", description=__doc__)
    parser.add_argument(
        "--arch", action="append", help="only this card, such as sm_90; may be repeated"
    )
    parser.add_argument("--only", help="only variants whose kernel and name contain this")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table here")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> Iterator[Record]:
    from octavo.kernels.check.compiling import check
    from octavo.kernels.check.variants import variants

    wanted = [
        index
        for index, variant in enumerate(variants())
        if (not options.arch or variant.arch.name in options.arch)
        and (options.only or "") in f"{variant.name} {variant.label}"
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        yield from pool.map(check, wanted, chunksize=4)


if __name__ == "__main__":
    sys.exit(main())
