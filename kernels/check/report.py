"""What the check says: a line for each kernel, and a table for the documentation."""

from collections import defaultdict
from typing import Any

Record = dict[str, Any]  # of compiling.as_record


def line(record: Record) -> str:
    """One kernel for the terminal."""
    text = "{arch:7} {kernel:16} {variant:26} {dtype:5} {tile:9}".format(**record)
    text += " {registers:4} registers {spilled_bytes:4} spilled".format(**record)
    text += " {shared_bytes:6} shared {matrix}".format(**record)
    return " ".join([text.rstrip(), *(f"<- {fault}" for fault in record["faults"])])


def markdown(records: list[Record]) -> str:
    """A table with a line for the variants of a kernel that belong together, and a column per card."""
    archs = list(dict.fromkeys(record["arch"] for record in records))
    cells: dict[tuple[str, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        cells[record["kernel"], record["family"]][record["arch"]].append(record)
    lines = [
        "| kernel | variants | " + " | ".join(archs) + " |",
        "|---|---|" + "---|" * len(archs),
        *(_row(kernel, family, archs, found) for (kernel, family), found in cells.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(kernel: str, family: str, archs: list[str], found: dict[str, list[Record]]) -> str:
    cells = [_cell(found[arch]) if found[arch] else "" for arch in archs]
    return f"| `{kernel}` | {family} | " + " | ".join(cells) + " |"


def _cell(records: list[Record]) -> str:
    """The most that any of the variants takes: registers, spilled bytes, KiB of shared memory."""
    registers, spilled, shared = (
        max(record[name] for record in records)
        for name in ("registers", "spilled_bytes", "shared_bytes")
    )
    matrix = ", ".join(dict.fromkeys(record["matrix"] for record in records if record["matrix"]))
    return f"{registers} / {spilled} / {shared / 1024:.0f}" + (f" {matrix}" if matrix else "")
