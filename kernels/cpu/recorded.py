"""Runs of native operations, noted once and then repeated by one call of the extension for any number
of tokens: between operations called one by one lies more Python than some of them take.

Operations note their arguments, and the extension's table OPERATIONS says what each of them is. Every
address that an operation reads must be of something that the forward brings, or that an operation
before it computed; what torch does between two operations shows as an address that nobody knows.

    noted     linear(r=0x70, t=7, .., w=0x90)   gate(r=0x90, t=7, .., w=0xb0)
    program   linear(given 1, 1 * tokens, .., arena + 0 * tokens)   gate(arena + 0 * tokens, ..)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.cpu import _native
from octavo.kernels.recording import Brought, RecordingError

_CONSTANT, _PER_TOKEN, _IN_ARENA, _GIVEN = range(4)  # as csrc/module.c has them
_ALIGNMENT = 64  # bytes: a line of a cache, and the longest vector

P = ParamSpec("P")


@dataclass(frozen=True)
class Call:
    """One operation with its arguments."""

    name: str
    arguments: tuple[int | float, ...]

    def of(self, roles: str) -> list[int]:
        """The arguments of these letters of OPERATIONS; no address is 0."""
        _, takes = _native.OPERATIONS[self.name]
        both = zip(takes, self.arguments, strict=True)
        return [int(value) for role, value in both if role in roles and value]


@dataclass
class _Notes:
    calls: list[Call] = field(default_factory=list)
    # All that the calls read and write: while it is held, no address stands for two things.
    held: list[object] = field(default_factory=list)


_notes: ContextVar[_Notes | None] = ContextVar("_notes", default=None)


def invoke(
    held: Sequence[object], operation: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Calls an operation of the extension, and notes it while its thread records.

    Args:
        held: what the addresses among the arguments are of.
    """
    operation(*args, **kwargs)
    notes = _notes.get()
    if notes is not None:
        notes.calls.append(Call(operation.__name__, args))  # type: ignore[arg-type]
        notes.held.extend(held)


@contextmanager
def _noting() -> Iterator[_Notes]:
    notes = _Notes()
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def record(run: Callable[[], tuple[Tensor, ...]], brought: Brought) -> "Program":
    """As `octavo.kernels.recording.Record` has it."""
    with _noting() as notes:
        results = run()
    return _Recording(notes, brought, results).program()


def _given(brought: Brought) -> list[int]:
    """The number of sequences, then the addresses of a forward."""
    addresses = [rotation.data_ptr() for rotation in brought.rotations]
    count, rows = brought.rows.count, brought.rows.addresses
    return [count, brought.hidden.data_ptr(), brought.kv_slots.address, *rows, *addresses]


@dataclass
class Program:
    """Implements `octavo.kernels.recording.Recorded`. One forward at a time may run it."""

    words: npt.NDArray[np.int64]
    arena_bytes: int  # per token
    widths: list[int]  # of the results, [num_tokens, width] each
    held: list[object]  # weights and caches that the words have the addresses of
    _arena: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def run(self, brought: Brought) -> tuple[Tensor, ...]:
        tokens = len(brought.hidden)
        if self._arena.nbytes < tokens * self.arena_bytes:
            self._arena = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._arena = torch.empty(tokens * self.arena_bytes, dtype=torch.uint8)
        results = tuple(torch.empty(tokens, width) for width in self.widths)
        addresses = [result.data_ptr() for result in results]
        given = np.array([*_given(brought), *addresses], dtype=np.int64)
        words = self.words
        _native.replay(words.ctypes.data, len(words), tokens, self._arena.data_ptr(), given.ctypes.data)
        return results


def _sizes(held: list[object]) -> dict[int, int]:
    """Bytes at each address; some tensors are views of the beginning of others."""
    sizes: dict[int, int] = {}
    for item in held:
        if isinstance(item, Tensor):
            sizes[item.data_ptr()] = max(item.nbytes, sizes.get(item.data_ptr(), 0))
    return sizes


class _Recording:
    """From notes to a program."""

    def __init__(self, notes: _Notes, brought: Brought, results: tuple[Tensor, ...]) -> None:
        """Raises RecordingError."""
        self._calls, self._held = notes.calls, notes.held
        self._tokens, self._results = len(brought.hidden), results
        sizes = _sizes(notes.held)
        written = {address for call in self._calls for address in call.of("w")}
        self._sizes = {address: self._per_token(sizes[address]) for address in written}
        self._count, *brings = _given(brought)
        self._check(set(brings))
        self._check_results()
        given = brings + [result.data_ptr() for result in results]
        if len(set(given)) < len(given):
            raise RecordingError("two of what a forward brings and returns are the same")
        self._places = {address: place for place, address in enumerate(given, 1)}
        self._offsets, self._arena_bytes = self._arrange()

    def _per_token(self, value: int) -> int:
        if value % self._tokens:
            raise RecordingError(f"{value} rows or bytes are no multiple of {self._tokens} tokens")
        return value // self._tokens

    def _check(self, known: set[int]) -> None:
        """That each call reads what calls before it wrote, or what is brought."""
        for number, call in enumerate(self._calls):
            if not known.issuperset(call.of("r")):
                raise RecordingError(f"operation {number}, {call.name}, reads what torch computed")
            written = call.of("w")
            if not known.isdisjoint(written + call.of("k")):
                raise RecordingError(
                    f"operation {number}, {call.name}, takes what changes for a constant"
                )
            known.update(written)

    def _check_results(self) -> None:
        """That each is all of what a call wrote."""
        for result in self._results:
            size = self._sizes.get(result.data_ptr())
            if size is None or size * self._tokens != result.nbytes or not result.is_contiguous():
                raise RecordingError("no operation computed the result")

    def _arrange(self) -> tuple[dict[int, int], int]:
        """Where in the arena each intermediate lies, and the arena's size; bytes per token.

        First fit: the lowest place beside those that are read later still.
        """
        last = {a: n for n, call in enumerate(self._calls) for a in call.of("rw")}
        offsets: dict[int, int] = {}
        live: list[tuple[int, int, int]] = []  # begin, end, address
        total = 0
        for number, call in enumerate(self._calls):
            for address in call.of("w"):
                if address in self._places:
                    continue
                size = -(-self._sizes[address] // _ALIGNMENT) * _ALIGNMENT
                begin = _first_gap(sorted(live), size)
                offsets[address] = begin
                live.append((begin, begin + size, address))
                total = max(total, begin + size)
            live = [place for place in live if last[place[2]] > number]
        return offsets, total

    def program(self) -> Program:
        words: list[int] = []
        for call in self._calls:
            index, takes = _native.OPERATIONS[call.name]
            words.append(index)
            for role, value in zip(takes, call.arguments, strict=True):
                words.extend(self._word(role, value))
        widths = [result.shape[1] for result in self._results]
        fixed = {address for call in self._calls for address in call.of("k")}
        held = [t for t in self._held if not isinstance(t, Tensor) or t.data_ptr() in fixed]
        return Program(np.array(words, dtype=np.int64), self._arena_bytes, widths, held)

    def _word(self, role: str, value: int | float) -> tuple[int, int]:
        """The source and value of an argument."""
        if role == "x":
            return _CONSTANT, int(np.float64(value).view(np.int64))
        number = int(value)
        if role == "b":
            if number != self._count:
                raise RecordingError(f"{number} sequences where the forward has {self._count}")
            return _GIVEN, 0
        if role == "t":
            return _PER_TOKEN, self._per_token(number)
        if role in "kn" or not number:
            return _CONSTANT, number
        if number in self._places:
            return _GIVEN, self._places[number]
        return _IN_ARENA, self._offsets[number]


def _first_gap(taken: list[tuple[int, int, int]], size: int) -> int:
    """Where `size` bytes lie beside the places that are taken, which are in order."""
    begin = 0
    for first, end, _ in taken:
        if first - begin >= size:
            break
        begin = max(begin, end)
    return begin
