"""The rows of a plan: decodes, and chunks of the prompts that are being prefilled."""

from dataclasses import dataclass

import numpy as np

from octavo.controlplane.draft import Draft
from octavo.controlplane.sequence import Sequence
from octavo.controlplane.state import GangState
from octavo.proto.wire import Int32s, int32s


@dataclass(frozen=True)
class Decodes:
    """Decode rows, and the block table entries to which they write."""

    slots: Int32s
    indices: Int32s  # in each slot's table
    appends: np.ndarray[tuple[int], np.dtype[np.bool_]]  # the entry is new
    copies: int  # blocks that copy-on-write takes
    wants: int  # blocks in all


class Rows(GangState):
    """Adds rows to a draft, and with them the blocks that they write."""

    def _decodes(self, slots: Int32s) -> Decodes:
        """What a decode of each of these slots writes."""
        indices = self.slots.computed[slots] // self.shape.block_size
        appends = indices == self.blocks.lengths[slots]
        within = ~appends
        copies = self.blocks.copies_wanted(slots[within], indices[within])
        return Decodes(slots, indices, appends, copies, wants=copies + int(appends.sum()))

    def _add_decodes(self, draft: Draft, decodes: Decodes) -> None:
        rows = decodes.slots
        if decodes.copies:
            within, at = rows[~decodes.appends], decodes.indices[~decodes.appends]
            shared = self.blocks.is_shared(within, at)
            for slot, index in zip(within[shared].tolist(), at[shared].tolist(), strict=True):
                self._copy_on_write(draft, slot, index)
        new = rows[decodes.appends]
        blocks = self.blocks.append(new)
        draft.add_entries(new, decodes.indices[decodes.appends], blocks)
        draft.decodes = np.concatenate([draft.decodes, rows])
        draft.budget -= len(rows)
        self.slots.computed[rows] += 1
        # The next token of a beam depends on this plan's result.
        self.slots.decoding[rows[self.slots.searching[rows]]] = False
        self.counters.decode_tokens += len(rows)

    def _copy_on_write(self, draft: Draft, slot: int, index: int) -> None:
        copy = self.blocks.copy_on_write(slot, index)
        if copy is not None:
            draft.copies.append(copy)
            draft.add_entries(int32s([slot]), int32s([index]), int32s([copy[1]]))
            self.counters.copied_blocks += 1

    def _add_prefills(self, draft: Draft) -> None:
        for sequence in list(self._prefilling):
            if draft.budget == 0:
                return
            self._add_chunk(draft, sequence)

    def _add_chunk(self, draft: Draft, sequence: Sequence) -> None:
        """The next part of a sequence's prefill, as far as the budget reaches."""
        slot = sequence.slot
        assert slot is not None
        if self._must_wait(sequence):
            return
        left = sequence.target - int(self.slots.computed[slot])
        length = min(left, self.shape.prefill_chunk, draft.budget)
        draft.add_chunk(slot, length)
        self.slots.computed[slot] += length
        self.counters.prefill_tokens += length
        if length == left:
            self._prefilling.remove(sequence)
            self._complete_prefill(draft, sequence)

    def _must_wait(self, sequence: Sequence) -> bool:
        first = sequence.waits_for
        if first is None or first.slot is None:
            return False
        return int(self.slots.computed[first.slot]) < sequence.waits_until

    def _complete_prefill(self, draft: Draft, sequence: Sequence) -> None:
        """The last chunk's row draws for the sequence, or for all samples of a fresh group."""
        group = sequence.group
        fresh = group.is_fresh
        sequence.group.is_prefilling = any(other.group is group for other in self._prefilling)
        if group.end == len(group.prompt):  # no output is wanted, only scores of the prompt
            draft.ending.extend(group.live)
            return
        drawing = group.live if fresh and group.search is None else [sequence]
        for sample in drawing:
            if sample.finished:
                continue
            assert sample.slot is not None
            if sample is not sequence:
                self._fork(draft, sequence, sample)
            draft.add_draw(sample.slot)
            self.slots.decoding[sample.slot] = group.search is None
        if sequence.finished:
            draft.done_with.append(sequence)

    def _fork(self, draft: Draft, parent: Sequence, child: Sequence) -> None:
        assert parent.slot is not None and child.slot is not None
        self.blocks.fork(parent.slot, child.slot)
        self.slots.computed[child.slot] = self.slots.computed[parent.slot]
        self.slots.announced[child.slot] = True
        draft.forks.append((parent.slot, child.slot, child.sample))
