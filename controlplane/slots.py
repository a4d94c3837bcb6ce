"""The running sequences as arrays, one entry per slot.

A slot's tokens are ``[prompt | outputs]``. Two counters walk along them:

    0 ............ computed ......... known ......... end
    KV is planned or there   |   tokens received   |  never more tokens than this

With plans in flight `computed` may run ahead of `known`: a decode row reads the token that the
worker drew last, which the control plane has not seen yet.
"""

import numpy as np
import numpy.typing as npt

from octavo.controlplane.sequence import Sequence
from octavo.proto.wire import Int32s

NO_TOKEN = -1  # equals no token id


class SlotTable:
    """State of `num_slots` slots. The scheduler is its one writer."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * num_slots
        # Goes up when a slot is freed: a result's row counts only if it is still the same.
        self.generation = _ints(num_slots)
        self.announced = np.zeros(num_slots, dtype=np.bool_)  # the worker knows that the slot is taken
        self.decoding = np.zeros(num_slots, dtype=np.bool_)
        self.searching = np.zeros(num_slots, dtype=np.bool_)  # a beam: gets candidates, not tokens
        self.computed = _ints(num_slots)
        self.known = _ints(num_slots)
        self.end = _ints(num_slots)
        self.prompt_len = _ints(num_slots)
        self.eos = _ints(num_slots)  # the one token that ends the sequence, or NO_TOKEN
        self.has_stop_set = np.zeros(num_slots, dtype=np.bool_)  # ... or one of stop_sets[slot]
        self.stop_sets: dict[int, frozenset[int]] = {}
        self.gateway = np.zeros(num_slots, dtype=np.int64)  # where its tokens go: an incarnation
        self.request = _ints(num_slots)
        self.attempt = _ints(num_slots)
        self.sample = _ints(num_slots)
        # One more column than a sequence can have tokens: rows in flight need no bounds.
        self._tokens = np.zeros((num_slots, max_len + 1), dtype=np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, history: Int32s, computed: int) -> int:
        """Gives a free slot to a sequence whose tokens so far are `history`."""
        slot = self._free.pop()
        group = sequence.group
        self.sequences[slot] = sequence
        sequence.slot = slot
        self._tokens[slot, : len(history)] = history
        self.known[slot] = len(history)
        self.computed[slot] = computed
        self.prompt_len[slot] = len(group.prompt)
        self.end[slot] = group.end
        self.gateway[slot], self.request[slot] = group.id
        self.attempt[slot] = group.attempt
        self.sample[slot] = sequence.sample
        self.searching[slot] = group.search is not None
        stops = group.stops
        self.has_stop_set[slot] = len(stops) > 1
        self.eos[slot] = next(iter(stops)) if len(stops) == 1 else NO_TOKEN
        if len(stops) > 1:
            self.stop_sets[slot] = stops
        return slot

    def release(self, slot: int) -> None:
        """Takes the slot from its sequence, which keeps a copy of its known outputs."""
        sequence = self.sequences[slot]
        assert sequence is not None
        sequence.outputs = self.tokens(slot)[self.prompt_len[slot] :].copy()
        sequence.slot = None
        self.sequences[slot] = None
        self.decoding[slot] = self.announced[slot] = False
        self.generation[slot] += 1
        self.stop_sets.pop(slot, None)
        self._free.append(slot)

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
        return np.flatnonzero(self.decoding & (self.computed + 1 < self.end)).astype(np.int32)

    def append(self, slots: Int32s, tokens: Int32s) -> None:
        """One received token for each of these distinct slots."""
        self._tokens[slots, self.known[slots]] = tokens
        self.known[slots] += 1

    def stopped(self, slots: Int32s, tokens: Int32s) -> npt.NDArray[np.bool_]:
        """Which of these slots end with the token just appended."""
        ends: npt.NDArray[np.bool_] = tokens == self.eos[slots]
        for row in np.flatnonzero(self.has_stop_set[slots]):
            ends[row] = int(tokens[row]) in self.stop_sets[int(slots[row])]
        return ends


def _ints(count: int) -> Int32s:
    return np.zeros(count, dtype=np.int32)
