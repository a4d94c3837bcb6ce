"""The rows of a plan: decodes, and chunks of the prompts that are being prefilled."""

from typing import NamedTuple

import numpy as np

from octavo.controlplane.draft import Draft
from octavo.controlplane.sequence import Sequence
from octavo.controlplane.state import GangState
from octavo.proto.wire import Int32s, int32s


class Decodes(NamedTuple):
    """Decode rows, and the blocks that they take."""

    slots: Int32s
    growing: Int32s  # of these, the slots that write to a new block
    copies: int  # blocks that copy-on-write takes
    wants: int  # blocks in all


class Rows(GangState):
    """Adds rows to a draft, and with them the blocks that they write."""

    def _decodes(self, slots: Int32s) -> Decodes:
        """What a decode of each of these slots writes."""
        full = self.blocks.lengths[slots] * self.shape.block_size == self.slots.computed[slots]
        growing = slots[full]
        copies = self.blocks.copies_wanted(*self._writes(slots)) if self.blocks.forked else 0
        return Decodes(slots, growing, copies, wants=copies + len(growing))

    def _writes(self, slots: Int32s) -> tuple[Int32s, Int32s]:
        """Those of these slots that write to a block which they have, and its index in their tables."""
        indices = self.slots.computed[slots] // self.shape.block_size
        within = indices < self.blocks.lengths[slots]
        return slots[within], indices[within]

    def _add_decodes(self, draft: Draft, decodes: Decodes) -> None:
        rows = decodes.slots
        if decodes.copies:
            within, at = self._writes(rows)
            shared = self.blocks.is_shared(within, at)
            for slot, index in zip(within[shared].tolist(), at[shared].tolist(), strict=True):
                self._copy_on_write(draft, slot, index)
        if len(decodes.growing):
            draft.add_entries(decodes.growing, *self.blocks.append(decodes.growing))
        draft.decodes = np.concatenate([draft.decodes, rows]) if len(draft.decodes) else rows
        draft.budget -= len(rows)
        self.slots.computed[rows] += 1
        if self.slots.num_searching:  # the next token of a beam depends on this plan's result
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
