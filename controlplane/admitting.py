"""Groups come onto the device: with slots, blocks, and the first rows of their prefill."""

import bisect

from octavo.controlplane.admission import Admission, Entrance, Single, plan_admission, plan_single
from octavo.controlplane.draft import Draft
from octavo.controlplane.rows import Rows
from octavo.controlplane.sequence import Sequence, SequenceGroup, State
from octavo.proto.wire import Int32s, int32s

NO_BLOCKS = int32s()


class Admitting(Rows):
    """Admits groups whole, in the order of their keys."""

    # -- admission -------------------------------------------------------------------------------

    def _next_in_line(self) -> SequenceGroup | None:
        """The group that comes next; a preempted one before a waiting one unless its key is larger."""
        preempted, waiting = self.preempted.first(), self.waiting.first()
        if preempted is None or waiting is None:
            return preempted or waiting
        return min(preempted, waiting, key=lambda group: group.key)

    def _admit_in_order(self, draft: Draft) -> None:
        """Admits groups until the next one does not fit or the budget is spent."""
        while draft.budget > 0 and not self.keeps_alone():
            group = self._next_in_line()
            if group is None or len(group.live) > self.slots.num_free:
                return
            if group.is_suspect and self.running:
                return
            if group.state is State.WAITING and self._admit_singles(draft):
                continue
            admission = plan_admission(group, self.blocks)
            if admission.wants + self._spare(bool(self.running)) > self.blocks.available:
                return
            self._leave_queue(group)
            self._admit(draft, group, admission)

    def keeps_alone(self) -> bool:
        """Whether a group runs that must be alone: nothing else may be lost with it."""
        suspect = self.suspect
        if suspect is None:
            return False
        if suspect.state is State.RUNNING and not self.has_progressed(suspect):
            return True
        self.suspect = None
        return False

    def _spare(self, anybody_runs: bool) -> int:
        """Blocks that admission leaves free; none when nobody runs, so that somebody can."""
        return int(self.shape.watermark * self.shape.num_blocks) if anybody_runs else 0

    # -- the common case, many at once -------------------------------------------------------------

    def _admit_singles(self, draft: Draft) -> bool:
        """Admits the leading waiting groups of one sample. Returns whether there are any that fit."""
        batch = self._leading_singles(draft.budget)
        if not batch:
            return False
        self.waiting.remove_first(len(batch))
        self.running.add(*[single.group for single in batch])
        for single in batch:
            group = single.group
            group.state, group.gang = State.RUNNING, self.number
            if not group.started:
                group.started = True
                self.outputs.add_started(group, len(single.found) * self.shape.block_size)
        self._enter_singles(draft, batch)
        return True

    def _leading_singles(self, budget: int) -> list[Single]:
        """The first waiting groups that are single, fit, and are computed in one chunk each.

        The blocks that they found are held for them from here on.
        """
        batch: list[Single] = []
        slots, room = self.slots.num_free, self.blocks.available
        spare = self._spare(bool(self.running))
        chunk = self.shape.prefill_chunk
        comes_back = self.preempted.first()
        for group in self.waiting:
            if len(batch) == slots or not group.is_single:
                break
            if comes_back is not None and comes_back.key < group.key:
                break
            single = plan_single(group, self.blocks)
            if single.left > min(budget, chunk) or single.wants + spare > room:
                break
            self.blocks.share(single.found)
            room -= single.fresh + single.cached
            budget -= single.left
            batch.append(single)
            spare = self._spare(anybody_runs=True)
        return batch

    def _enter_singles(self, draft: Draft, batch: list[Single]) -> None:
        """Gives them slots and blocks, and adds their only chunks and first draws."""
        sequences = [single.group.sequences[0] for single in batch]
        prompts = [single.group.prompt for single in batch]
        slots = self.slots.take_all(sequences, prompts, [len(prompt) for prompt in prompts])
        lengths = [len(single.found) + single.fresh for single in batch]
        tables = self.blocks.allocate_all(slots, lengths, [single.found for single in batch])
        self.slots.announced[slots] = self.slots.decoding[slots] = True
        draft.draw_chunks += range(len(draft.chunk_slots), len(draft.chunk_slots) + len(slots))
        draft.draw_slots += slots
        draft.chunk_slots += slots
        draft.chunk_lengths += [single.left for single in batch]
        admits = draft.admits
        admits.slots += slots
        admits.tokens += prompts
        admits.prompt_lens += map(len, prompts)
        admits.computed += [len(single.found) * self.shape.block_size for single in batch]
        admits.block_counts += lengths
        admits.blocks.append(tables)
        admits.samples += [0] * len(batch)
        admits.samplings += [single.group.sampling.packed for single in batch]
        admits.prompt_logprobs_from += [0] * len(batch)
        left = sum(single.left for single in batch)
        draft.budget -= left
        self.counters.prefill_tokens += left
        self.counters.prefix_hit_tokens += sum(map(len, prompts)) - left
        if self.blocks.index is not None:
            for slot, single in zip(slots, batch, strict=True):
                self.blocks.start_chain(slot, single.group.path, single.found)

    # -- all others ----------------------------------------------------------------------------------

    def _admit(self, draft: Draft, group: SequenceGroup, admission: Admission) -> None:
        group.state, group.gang = State.RUNNING, self.number
        self.running.add(group)
        if group.is_suspect:
            self.suspect = group
        found = len(admission.entrances[0].found) * self.shape.block_size
        if not group.started:
            group.started = True
            self.outputs.add_started(group, cached_tokens=found)
        if group.is_swapped:
            self._swap_in(draft, group, admission)
            return
        if group.is_fresh:
            for sequence in group.live[1:]:  # they hold slots, and fork from the first
                self.slots.take(sequence, group.prompt, computed=0)
        if len(admission.entrances) == 1:
            self._enter(draft, admission.entrances[0])
            return
        with self.blocks.keeping([e for entrance in admission.entrances for e in entrance.found]):
            for entrance in admission.entrances:
                self._enter(draft, entrance)

    def _enter(self, draft: Draft, entrance: Entrance) -> None:
        """Gives a sample its slot and blocks, and starts its prefill."""
        sequence, size = entrance.sequence, self.shape.block_size
        self.counters.prefix_hit_tokens += len(entrance.found) * size
        shared = NO_BLOCKS
        if entrance.found:
            shared = int32s([entry.block for entry in entrance.found])
        elif entrance.leader is not None:
            assert entrance.leader.slot is not None
            shared = self.blocks.table(entrance.leader.slot)[: entrance.led_tokens // size].copy()
        computed = len(shared) * size
        slot = self.slots.take(sequence, entrance.history, computed)
        self.blocks.allocate(slot, len(entrance.history), shared)
        self.blocks.start_chain(slot, entrance.path, entrance.found)
        sequence.waits_for, sequence.waits_until = entrance.leader, entrance.led_tokens
        sequence.target = len(entrance.history)
        self._announce(draft, sequence, entrance.history)
        sequence.group.is_prefilling = True
        bisect.insort(self._prefilling, sequence, key=lambda s: (s.group.key, s.sample))
        if draft.budget > 0:
            self._add_chunk(draft, sequence)

    def _announce(self, draft: Draft, sequence: Sequence, history: Int32s) -> None:
        """Tells the worker of a sequence's slot, as it is before this plan's rows."""
        slot = sequence.slot
        assert slot is not None
        self.slots.announced[slot] = True
        group = sequence.group
        table = self.blocks.table(slot).copy()
        admits = draft.admits
        admits.slots.append(slot)
        admits.tokens.append(history)
        admits.prompt_lens.append(len(group.prompt))
        admits.computed.append(int(self.slots.computed[slot]))
        admits.block_counts.append(len(table))
        admits.blocks.append(table)
        admits.samples.append(sequence.sample)
        admits.samplings.append(group.sampling.packed)
        admits.prompt_logprobs_from.append(group.prompt_scores_from)

    def _swap_in(self, draft: Draft, group: SequenceGroup, admission: Admission) -> None:
        slots, tables = [], []
        for entrance in admission.entrances:
            table = entrance.sequence.swapped
            assert table is not None
            slots.append(self.slots.take(entrance.sequence, entrance.history, table.computed))
            tables.append(table)
        pairs = self.blocks.swap_in(slots, tables, admission.hits)
        draft.swap_in.extend(pairs.tolist())
        self._count_swapped("in", len(pairs))
        self.counters.prefix_hit_tokens += len(admission.hits) * self.shape.block_size
        for entrance in admission.entrances:
            sequence = entrance.sequence
            sequence.swapped = None
            assert sequence.slot is not None
            self.blocks.start_chain(sequence.slot, entrance.path, entrance.found)
            self._announce(draft, sequence, entrance.history)
            self.slots.decoding[sequence.slot] = True
        if len(slots) <= draft.budget:  # at once, before others take the blocks of its next tokens
            self._add_decodes(draft, self._decodes(int32s(slots)))
