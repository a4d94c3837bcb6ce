"""Request lengths: from a CSV of pairs, from a trace with arrival times, or all the same."""

import csv
import datetime
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

PAIR_COLUMNS = ("prompt_tokens", "output_tokens")
TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class InputError(ValueError):
    """A file or value that the load generator cannot use. The text names it and says why."""


class Lengths(NamedTuple):
    """One request in tokens; both at least 1."""

    prompt: int
    output: int


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float  # seconds after the trace's first request
    lengths: Lengths


def read_pairs(path: str | Path, max_total: int | None = None) -> list[Lengths]:
    """The pairs of a CSV with the header ``prompt_tokens,output_tokens``.

    Args:
        max_total: keeps pairs of at most this many tokens, prompt and output together.

    Raises:
        InputError: no such file, another header, a line that is no pair, or no pair is left.
    """
    rows = _rows(path, PAIR_COLUMNS)
    pairs = [_lengths(path, line, prompt, output) for line, (prompt, output) in rows]
    return _not_empty(path, [pair for pair in pairs if _usable(pair, max_total)], max_total)


def read_trace(path: str | Path, max_total: int | None = None) -> list[Arrival]:
    """The requests of a CSV with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Time stamps are ISO dates or plain seconds. The first request that is kept arrives at 0.

    Raises:
        InputError: as `read_pairs`, or the time stamps descend.
    """
    arrivals = []
    for line, (stamp, prompt, output) in _rows(path, TRACE_COLUMNS):
        lengths = _lengths(path, line, prompt, output)
        if _usable(lengths, max_total):
            arrivals.append(Arrival(_seconds(path, line, stamp), lengths))
    _not_empty(path, arrivals, max_total)
    start = arrivals[0].at
    arrivals = [Arrival(arrival.at - start, arrival.lengths) for arrival in arrivals]
    if any(later.at < earlier.at for earlier, later in itertools.pairwise(arrivals)):
        raise InputError(f"{path}: TIMESTAMP descends; sort the trace by it")
    return arrivals


def sample_pairs(pairs: Sequence[Lengths], count: int, rng: random.Random) -> list[Lengths]:
    """`count` of the pairs: without repetition as long as there are enough."""
    if count <= len(pairs):
        return rng.sample(pairs, count)
    return rng.choices(pairs, k=count)


def _rows(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and the wanted columns of each line."""
    try:
        with open(path, newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path}: the header lacks {', '.join(missing)}")
            for row in reader:
                yield reader.line_num, [row[name] or "" for name in columns]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _lengths(path: str | Path, line: int, prompt: str, output: str) -> Lengths:
    try:
        return Lengths(int(prompt), int(output))
    except ValueError as error:
        raise InputError(f"{path}, line {line}: {prompt!r}, {output!r} are not two integers") from error


def _usable(lengths: Lengths, max_total: int | None) -> bool:
    return min(lengths) >= 1 and (max_total is None or sum(lengths) <= max_total)


def _seconds(path: str | Path, line: int, stamp: str) -> float:
    try:
        return float(stamp)
    except ValueError:
        pass  # then it is a date
    try:
        return datetime.datetime.fromisoformat(stamp.strip()).timestamp()
    except ValueError as error:
        raise InputError(f"{path}, line {line}: {stamp!r} is neither a date nor seconds") from error


def _not_empty(path: str | Path, found: list[T], max_total: int | None) -> list[T]:
    if found:
        return found
    limit = "" if max_total is None else f" and prompt + output <= {max_total}"
    raise InputError(f"{path}: no line has at least 1 prompt and 1 output token{limit}")
