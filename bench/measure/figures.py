"""Figures of many measurements, as numbers and as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """How a quantity is spread over its measurements; all in the unit of the measurements."""

    count: int
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where nothing was measured. Percentiles interpolate linearly."""
        if not len(values):
            return None
        p50, p99 = np.percentile(np.asarray(values, dtype=np.float64), [50, 99])
        return cls(len(values), float(np.mean(values)), float(p50), float(p99))


def number(value: float | None) -> str:
    """Three digits that matter: "0.123", "1.23", "12.3", "123", "1234"."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 4)}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain-text table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [_line(header, widths), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def spread_rows(spreads: Mapping[str, Spread | None], scale: float) -> list[list[str]]:
    """A table row (name, mean, p50, p99) for each, multiplied by `scale`."""
    rows = []
    for name, spread in spreads.items():
        values = (spread.mean, spread.p50, spread.p99) if spread else (None, None, None)
        rows.append([name, *(number(None if v is None else v * scale) for v in values)])
    return rows
