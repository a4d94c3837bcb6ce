"""The running sequences as arrays, one entry per slot.

A slot's tokens are ``[prompt | outputs]``. Two counters walk along them:

    0 ............ computed ......... known ......... end
    KV is planned or there   |   tokens received   |  never more tokens than this

With plans in flight `computed` may run ahead of `known`: a decode row reads the token that the
worker drew last, which the control plane has not seen yet.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.controlplane.sequence import Sequence
from octavo.proto.wire import Int32s

NO_TOKEN = -1  # equals no token id


class Fields(NamedTuple):
    """What a table says of some of its slots: copies, ``[n]`` each."""

    known: Int32s
    computed: Int32s
    prompt_len: Int32s
    end: Int32s
    request: Int32s
    attempt: Int32s
    sample: Int32s
    eos: Int32s


class SlotTable:
    """State of `num_slots` slots. The scheduler is its one writer."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * num_slots
        # Goes up when a slot is freed: a result's row counts only if it is still the same.
        self.generation = np.zeros(num_slots, dtype=np.int32)
        self.announced = np.zeros(num_slots, dtype=np.bool_)  # the worker knows that the slot is taken
        self.decoding = np.zeros(num_slots, dtype=np.bool_)
        self.searching = np.zeros(num_slots, dtype=np.bool_)  # a beam: gets candidates, not tokens
        self.num_searching = 0
        # Rows of one array, read and written together in the order of `Fields`. `request`, `attempt`,
        # `sample` and `gateway` (an incarnation) say where the tokens go; `eos` is the one token that
        # ends the sequence, or NO_TOKEN.
        self._fields = np.zeros((8, num_slots), dtype=np.int32)
        self.known, self.computed, self.prompt_len, self.end = self._fields[:4]
        self.gateway = np.zeros(num_slots, dtype=np.int64)
        self.has_stop_set = np.zeros(num_slots, dtype=np.bool_)  # ... or one of stop_sets[slot]
        self.stop_sets: dict[int, frozenset[int]] = {}
        # One more column than a sequence can have tokens: rows in flight need no bounds.
        self._tokens = np.zeros((num_slots, max_len + 1), dtype=np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, history: Int32s, computed: int) -> int:
        """Gives a free slot to a sequence whose tokens so far are `history`."""
        return self.take_all([sequence], [history], [computed])[0]

    def take_all(
        self, sequences: list[Sequence], histories: list[Int32s], computed: list[int]
    ) -> list[int]:
        """Gives a free slot to each of these sequences; arguments as for `take`."""
        slots = self._free[-len(sequences) :]
        del self._free[-len(sequences) :]
        entries = [
            (
                len(history),
                start,
                len((group := sequence.group).prompt),
                group.end,
                group.id.request,
                group.attempt,
                sequence.sample,
                NO_TOKEN if group.only_stop is None else group.only_stop,
            )
            for sequence, history, start in zip(sequences, histories, computed, strict=True)
        ]
        self._fields[:, slots] = np.array(entries, dtype=np.int32).T
        self.gateway[slots] = [sequence.group.id.gateway for sequence in sequences]
        for slot, sequence, history in zip(slots, sequences, histories, strict=True):
            self.sequences[slot] = sequence
            sequence.slot = slot
            self._tokens[slot, : len(history)] = history
            group = sequence.group
            if group.search is not None:
                self.searching[slot] = True
                self.num_searching += 1
            if group.only_stop is None and group.stops:
                self.has_stop_set[slot] = True
                self.stop_sets[slot] = group.stops
        return slots

    def release(self, slot: int) -> None:
        """Takes the slot from its sequence, which keeps a copy of its known outputs."""
        sequence = self.sequences[slot]
        assert sequence is not None
        sequence.outputs = self.tokens(slot)[self.prompt_len[slot] :].copy()
        self.release_all([slot])

    def release_all(self, slots: list[int]) -> None:
        """Takes the slots from their sequences, whose outputs are not wanted any more."""
        for slot in slots:
            sequence = self.sequences[slot]
            assert sequence is not None
            sequence.slot = self.sequences[slot] = None
            if self.stop_sets:
                self.stop_sets.pop(slot, None)
        if self.num_searching:
            self.num_searching -= int(self.searching[slots].sum())
        for flags in (self.decoding, self.announced, self.searching, self.has_stop_set):
            flags[slots] = False
        self.generation[slots] += 1
        self._free += slots

    def copy(self, parent: int, child: int) -> None:
        """Gives a slot the tokens of another one of its group."""
        known = self.known[parent]
        self._tokens[child, :known] = self._tokens[parent, :known]
        self.known[child], self.computed[child] = known, self.computed[parent]

    def tokens(self, slot: int) -> Int32s:
        """The known tokens of a slot."""
        return self._tokens[slot, : self.known[slot]]

    def decode_rows(self) -> Int32s:
        """Slots whose last drawn token is to be computed, and that may draw one more."""
        rows: Int32s = (self.decoding & (self.computed + 1 < self.end)).nonzero()[0].astype(np.int32)
        return rows

    def fields(self, slots: Int32s) -> Fields:
        """All fields of these slots, as they are now."""
        return Fields(*self._fields.take(slots, axis=1))

    def append(self, slots: Int32s, tokens: Int32s) -> Int32s:
        """One received token for each of these distinct slots. Returns how many each knows now."""
        known: Int32s = self.known[slots]
        self._tokens[slots, known] = tokens
        known += 1
        self.known[slots] = known
        return known

    def stopped(self, slots: Int32s, tokens: Int32s, eos: Int32s) -> npt.NDArray[np.bool_]:
        """Which of these slots end with the token just appended; `eos` is that of each."""
        ends: npt.NDArray[np.bool_] = tokens == eos
        if self.stop_sets:
            for row in np.flatnonzero(self.has_stop_set[slots]):
                ends[row] = int(tokens[row]) in self.stop_sets[int(slots[row])]
        return ends
