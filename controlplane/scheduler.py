"""The scheduler of one gang: queues in, one plan per iteration out, results back in.

    plan = scheduler.schedule()        # None: nothing to run, or wait for a result first
    outputs = scheduler.process(result)

A plan holds, in this order of preference: a decode row for every running sequence, chunks of the
prompts that are being prefilled, preempted groups that come back, waiting groups that are admitted.
Groups are admitted, preempted and resumed whole, in the order of their keys. With a plan in flight
the next one is built as if no sequence ended; rows of sequences that did end are dropped when their
result comes.
"""

import bisect

import numpy as np

from octavo.controlplane import preemption
from octavo.controlplane.admission import Admission, Entrance, plan_admission
from octavo.controlplane.beams import advance
from octavo.controlplane.counters import Counters
from octavo.controlplane.draft import Draft, Flight, Pending, Shape
from octavo.controlplane.fit import fit, longest_need
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.sequence import OrderedGroups, Sequence, SequenceGroup, State
from octavo.controlplane.state import GangState
from octavo.proto.plan import Admit, Plan, PromptLogprobs, Result
from octavo.proto.wire import Int32s, ProtocolError, int32s

NO_BLOCKS = int32s()


class Scheduler(GangState):
    """Decides who runs; see `GangState` for what it decides about."""

    def __init__(
        self,
        shape: Shape,
        waiting: OrderedGroups,
        counters: Counters,
        speeds: preemption.Speeds | None = None,
    ) -> None:
        super().__init__(shape, waiting, counters, speeds)
        self._fit_all()  # they may have waited for this gang

    def reset(self, shape: Shape) -> None:
        """A new epoch: nothing in either pool counts any more; its groups are to be recomputed."""
        for group in list(self.running):
            self._recompute(group, preemption.LOST)
        for group in self.preempted:
            self._forget_swapped(group)
        self._start(shape)
        self._fit_all()

    # -- requests --------------------------------------------------------------------------------

    def fit(self, group: SequenceGroup) -> str | None:
        """Sets where a group must end. Returns why it could never run, or None if it can."""
        return fit(group, self.shape, self.reserved)

    def largest_need(self) -> int:
        """Blocks of the largest accepted group when it is longest."""
        groups = [*self.running, *self.preempted, *self.waiting]
        needs = (longest_need(group, self.shape) for group in groups if not group.prefix)
        return max(needs, default=0)

    def cancel(self, group: SequenceGroup, samples: set[int]) -> None:
        """Ends these samples (all, if empty) at once; their blocks are free for the next plan."""
        if group.state is State.RUNNING and self._any_slot(group, samples):
            self._cancels.append(self.next_number - len(self._in_flight) - 1)
        for sequence in group.live:
            if not samples or sequence.sample in samples or group.search is not None:
                self._end(sequence)

    def fail_running(self, code: str, reason: str) -> None:
        """Ends every running group with an error."""
        for group in list(self.running):
            self.outputs.add_failure(group, code, reason)
            self.cancel(group, set())

    # -- one iteration: schedule -------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next plan, or None if there is nothing to run or a result must come first."""
        draft = Draft(budget=self.shape.max_batched_tokens)
        rows = self._make_room(draft)
        if rows is None:
            return None
        self._add_decodes(draft, rows)
        self._add_prefills(draft)
        # A plan that preempts takes nobody in: what was freed is for those who stay.
        if not draft.preempts:
            self._admit_in_order(draft)
        if not draft.matters and (self._in_flight or not self.pending.free_slots):
            return None
        return self._launch(draft)

    def _make_room(self, draft: Draft) -> Int32s | None:
        """The decode rows, once there are blocks for all of them; None: wait for a result first."""
        while True:
            rows = self.slots.decode_rows()
            if self._blocks_wanted(rows) <= self.blocks.available:
                break
            if self._in_flight:
                return None
            self._preempt(draft, max(self.running, key=lambda group: group.key))
        lower = [] if draft.preempts else self._groups_that_must_yield()
        if lower and self._in_flight:
            return None
        for group in lower:
            self._preempt(draft, group)
        return self.slots.decode_rows() if lower else rows

    def _blocks_wanted(self, rows: Int32s) -> int:
        indices = self.slots.computed[rows] // self.shape.block_size
        appends = indices == self.blocks.lengths[rows]
        return int(appends.sum()) + self.blocks.copies_wanted(rows[~appends], indices[~appends])

    def _add_decodes(self, draft: Draft, rows: Int32s) -> None:
        indices = self.slots.computed[rows] // self.shape.block_size
        appends = indices == self.blocks.lengths[rows]
        within, at = rows[~appends], indices[~appends]
        shared = self.blocks.is_shared(within, at)
        for slot, index in zip(within[shared].tolist(), at[shared].tolist(), strict=True):
            self._copy_on_write(draft, slot, index)
        new = rows[appends]
        blocks = self.blocks.append(new)
        entries = zip(new.tolist(), indices[appends].tolist(), blocks.tolist(), strict=True)
        draft.entries.extend(entries)
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
            draft.entries.append((slot, index, copy[1]))
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
        draft.chunks.append((slot, length))
        draft.budget -= length
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
            draft.draws.append((sample.slot, len(draft.chunks) - 1))
            self.slots.decoding[sample.slot] = group.search is None
        if sequence.finished:
            draft.done_with.append(sequence)

    def _fork(self, draft: Draft, parent: Sequence, child: Sequence) -> None:
        assert parent.slot is not None and child.slot is not None
        self.blocks.fork(parent.slot, child.slot)
        self.slots.computed[child.slot] = self.slots.computed[parent.slot]
        self.slots.announced[child.slot] = True
        draft.forks.append((parent.slot, child.slot, child.sample))

    # -- admission -------------------------------------------------------------------------------

    def _next_in_line(self) -> SequenceGroup | None:
        """The group that comes next; a preempted one before a waiting one unless its key is larger."""
        firsts = [group for group in (self.preempted.first(), self.waiting.first()) if group]
        return min(firsts, key=lambda group: group.key, default=None)

    def _admit_in_order(self, draft: Draft) -> None:
        """Admits groups until the next one does not fit or the budget is spent."""
        while draft.budget > 0:
            group = self._next_in_line()
            if group is None or len(group.live) > self.slots.num_free:
                return
            admission = plan_admission(group, self.blocks)
            if admission.wants + self._spare() > self.blocks.available:
                return
            self._leave_queue(group)
            self._admit(draft, group, admission)

    def _spare(self) -> int:
        """Blocks that admission leaves free; none when nobody runs, so that somebody can."""
        return int(self.shape.watermark * self.shape.num_blocks) if self.running else 0

    def _admit(self, draft: Draft, group: SequenceGroup, admission: Admission) -> None:
        group.state = State.RUNNING
        self.running.add(group)
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
        self.blocks.start_chain(slot, sequence.group.cache_salt, entrance.found)
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
        admit = Admit(
            slot=slot,
            tokens=history,
            prompt_len=len(group.prompt),
            computed=int(self.slots.computed[slot]),
            blocks=self.blocks.table(slot).copy(),
            sample=sequence.sample,
            sampling=group.sampling,
            prompt_logprobs_from=group.prompt_scores_from,
        )
        draft.admits.append(admit)

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
            self.blocks.start_chain(sequence.slot, group.cache_salt, entrance.found)
            self._announce(draft, sequence, entrance.history)
            self.slots.decoding[sequence.slot] = True
        if len(slots) <= draft.budget:  # at once, before others take the blocks of its next tokens
            self._add_decodes(draft, int32s(slots))

    # -- preemption --------------------------------------------------------------------------------

    def _groups_that_must_yield(self) -> list[SequenceGroup]:
        """Running groups of a lower level than the first in line, largest key first, as many as make
        room for it; none if it has room, or would have none all the same."""
        first = self._next_in_line()
        if first is None:
            return []
        lower = [group for group in self.running if group.key.priority > first.key.priority]
        if not lower:
            return []
        lower.sort(key=lambda group: group.key, reverse=True)
        blocks = self.blocks.available - self._blocks_wanted(self.slots.decode_rows())
        slots = self.slots.num_free
        wanted = plan_admission(first, self.blocks).wants + self._spare()
        for count in range(len(lower) + 1):
            if wanted <= blocks and len(first.live) <= slots:
                return lower[:count]
            if count < len(lower):
                blocks += self.blocks.num_held(self._slots_of(lower[count]))
                slots += len(lower[count].live)
        return []

    def _preempt(self, draft: Draft, group: SequenceGroup) -> None:
        """Takes everything from a group whose tokens are all known. It comes back whole."""
        draft.preempts = True
        kind = preemption.choose(self.shape.preemption, group, self.blocks, self.speeds)
        if kind == preemption.RECOMPUTE:
            self._recompute(group, kind)
            return
        sequences = group.live
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        computed = self.slots.computed[slots].tolist()
        tables, pairs = self.blocks.swap_out(slots, computed)
        draft.swap_out.extend(pairs.tolist())
        self._count_swapped("out", len(pairs))
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.swapped = table
            self._release_slot(sequence)
        self._put_back(group, kind)

    # -- sending and freeing ------------------------------------------------------------------------

    def _launch(self, draft: Draft) -> Plan:
        plan = draft.plan(self.shape.epoch, self.next_number, self.pending)
        rows = np.concatenate([draft.decodes, plan.draw_slots])
        generation = self.slots.generation
        chunks = [self._group_in(slot) for slot, _ in draft.chunks]
        tokens = int(plan.chunk_lengths.sum())
        flight = Flight(plan.number, rows, generation[rows], chunks, tokens, draft.ending)
        self._in_flight.append(flight)
        self._count_cancels(plan.number)
        for _, child, _ in self.pending.forks:
            self.slots.announced[child] = True
        self.pending = Pending()
        self.next_number += 1
        self.counters.plans += 1
        for slot, _ in draft.chunks:  # findable from now on: the plan that fills them is on its way
            self.blocks.extend_index(slot, self.slots.tokens(slot)[: self.slots.computed[slot]])
        for sequence in draft.done_with:
            self._release(sequence)
        self._count_sharing()
        return plan

    def _count_sharing(self) -> None:
        held = self.blocks.device.total - self.blocks.available
        if held:
            self.counters.sharing_ratio_sum += int(self.blocks.lengths.sum()) / held
            self.counters.sharing_ratio_count += 1

    def _group_in(self, slot: int) -> SequenceGroup:
        sequence = self.slots.sequences[slot]
        assert sequence is not None
        return sequence.group

    def _count_cancels(self, number: int) -> None:
        """Notes how many plans ran between each cancel and the plan that frees its slots."""
        for last_done in self._cancels:
            passed = number - last_done - 1
            self.counters.max_cancel_to_free_plans = max(self.counters.max_cancel_to_free_plans, passed)
        self.counters.cancels_freed += len(self._cancels)
        self._cancels.clear()

    # -- one iteration: process ----------------------------------------------------------------------

    def process(self, result: Result) -> Outputs:
        """Takes in the result of the oldest plan in flight.

        Raises:
            ProtocolError: it is not that plan's result; the gang must be reset.
        """
        flight = self._match(result)
        self.speeds.observe_prefill(flight.chunk_tokens, result.timings.forward)
        current = self.slots.generation[flight.rows] == flight.generations
        draws = np.flatnonzero(current & ~self.slots.searching[flight.rows]).astype(np.int32)
        if result.candidates is not None:
            self._take_candidates(flight, result, current)
        rows, tokens = flight.rows[draws], result.tokens[draws]
        self.outputs.add_tokens(self.slots, rows, tokens, draws, result.draw_logprobs)
        self._take_prompt_scores(flight, result.prompt_logprobs)
        self.slots.append(rows, tokens)
        self._index_generated(rows)
        self._finish_rows(rows, tokens)
        for sequence in flight.ending:
            if not sequence.finished:
                self._finish(sequence, "length", None)
        return self.take_outputs()

    def _match(self, result: Result) -> Flight:
        if not self._in_flight or result.number != self._in_flight[0].number:
            raise ProtocolError(f"result.number: {result.number} is not the oldest plan in flight")
        flight = self._in_flight[0]
        if len(result.tokens) != len(flight.rows):
            raise ProtocolError(f"result.tokens: {len(result.tokens)} for {len(flight.rows)} draws")
        return self._in_flight.popleft()

    def _index_generated(self, rows: Int32s) -> None:
        """Makes blocks findable that generation has filled, for the next turn of a chat."""
        if self.blocks.index is None:
            return
        there = np.minimum(self.slots.known[rows], self.slots.computed[rows])
        full = there // self.shape.block_size > self.blocks.indexed[rows]
        for slot, tokens in zip(rows[full].tolist(), there[full].tolist(), strict=True):
            self.blocks.extend_index(slot, self.slots.tokens(slot)[:tokens])

    def _take_candidates(self, flight: Flight, result: Result, current: Int32s) -> None:
        """Hands the answers of beams to their searches, and steps those that have them all."""
        answers = result.candidates
        assert answers is not None
        ends = np.cumsum(answers.counts)
        groups: dict[SequenceGroup, None] = {}
        for draw, count, end in zip(answers.draws.tolist(), answers.counts.tolist(), ends, strict=True):
            if not 0 <= draw < len(flight.rows):
                raise ProtocolError("result.candidates.draws: out of range")
            sequence = self.slots.sequences[flight.rows[draw]] if current[draw] else None
            if sequence is None or sequence.group.search is None:
                continue
            part = slice(int(end) - count, int(end))
            sequence.group.search.answer(sequence.sample, answers.ids[part], answers.logprobs[part])
            groups[sequence.group] = None
        for group in groups:
            if advance(group, self.slots, self.blocks, self.pending):
                self._finish_search(group)

    def _finish_search(self, group: SequenceGroup) -> None:
        assert group.search is not None
        self.outputs.add_hypotheses(group, group.search.finished)
        for sequence in group.live:
            self._end(sequence)

    def _take_prompt_scores(self, flight: Flight, parts: list[PromptLogprobs]) -> None:
        for part in parts:
            if not 0 <= part.chunk < len(flight.chunks):
                raise ProtocolError("result.prompt_logprobs.chunk: out of range")
            group = flight.chunks[part.chunk]
            if group.state is not State.FINISHED:
                self.outputs.add_prompt_scores(group, part)
                group.prompt_scores_from = part.start + len(part.logprobs)

    def _finish_rows(self, rows: Int32s, tokens: Int32s) -> None:
        stopped = self.slots.stopped(rows, tokens)
        full = self.slots.known[rows] >= self.slots.end[rows]
        for row in np.flatnonzero(stopped | full).tolist():
            sequence = self.slots.sequences[rows[row]]
            assert sequence is not None
            if stopped[row]:
                self._finish(sequence, "stop", int(tokens[row]))
            else:
                self._finish(sequence, "length", None)

    def _finish(self, sequence: Sequence, reason: str, stop_token: int | None) -> None:
        if sequence.group.prefix is None:
            self.outputs.add_finish(sequence, reason, stop_token)
        self._end(sequence)

    # -- integrity --------------------------------------------------------------------------

    def _fit_all(self) -> None:
        """Checks every group that is not running against a new shape."""
        for queue in (self.preempted, self.waiting):
            for group in list(queue):
                reason = self.fit(group)
                if reason is not None:
                    self.outputs.add_failure(group, "INVALID_ARGUMENT", reason)
                    self.cancel(group, set())
