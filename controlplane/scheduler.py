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
from collections import deque
from dataclasses import dataclass

import numpy as np

from octavo.controlplane.block_manager import BlockManager
from octavo.controlplane.draft import Draft, Shape
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.sequence import NO_OUTPUTS, OrderedGroups, Sequence, SequenceGroup, State
from octavo.controlplane.slots import SlotTable
from octavo.proto.plan import Admit, Plan, PromptLogprobs, Result
from octavo.proto.wire import Int32s, ProtocolError


@dataclass
class _Flight:
    """A plan that was sent and has no result yet."""

    number: int
    rows: Int32s  # slots for which tokens are drawn, in the result's order
    generations: Int32s  # of those slots when the plan was sent
    chunks: list[tuple[int, int]]  # (slot, generation) of each chunk
    ending: list[Sequence]  # sequences that this plan completes without a draw


@dataclass
class Counters:
    """Totals since the process started."""

    plans: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    max_cancel_to_free_plans: int = 0
    cancels_freed: int = 0


class Scheduler:
    """Owns a gang's running and preempted groups, its slots and its blocks."""

    def __init__(self, shape: Shape, waiting: OrderedGroups, counters: Counters) -> None:
        self.waiting = waiting  # shared by all gangs
        self.counters = counters
        self.preempted = OrderedGroups()
        self.outputs = Outputs()
        self.running: set[SequenceGroup] = set()
        self.reset(shape)

    def reset(self, shape: Shape) -> None:
        """A new epoch: nothing on the device counts any more; its groups are to be recomputed."""
        for group in list(self.running):
            self._preempt(group)
        self.shape = shape
        self.blocks = BlockManager(
            shape.num_blocks,
            shape.num_cpu_blocks,
            shape.block_size,
            shape.num_slots,
            shape.max_model_len,
        )
        self.slots = SlotTable(shape.num_slots, shape.max_model_len)
        self._prefilling: list[Sequence] = []
        self._in_flight: deque[_Flight] = deque()
        self._freed_slots: list[int] = []
        self._cancels: list[int] = []  # for each: the last plan that was done when it came
        self.next_number = 0
        self._fit_all()

    # -- requests --------------------------------------------------------------------------------

    def fit(self, group: SequenceGroup) -> str | None:
        """Sets where a group must end. Returns why it could never run, or None if it can."""
        prompt, n = len(group.prompt), len(group.sequences)
        shape, total = self.shape, self.shape.num_blocks
        if n > shape.num_slots:
            return f"n: {n} samples exceed the limit of {shape.num_slots} sequences that run at once"
        if prompt > shape.max_model_len or (prompt == shape.max_model_len and group.max_tokens):
            return f"prompt: {prompt} tokens leave no room in a context of {shape.max_model_len} tokens"
        if self.blocks.blocks_for(prompt) > total:
            room = total * shape.block_size
            return f"prompt: {prompt} tokens exceed the {room} tokens that the KV pool holds"
        shared = prompt // shape.block_size
        kv_room = (shared + (total - shared) // n) * shape.block_size  # tokens of each sample
        longest = max(kv_room, prompt) + 1  # the last token needs no KV
        group.end = min(prompt + group.max_tokens, shape.max_model_len, longest)
        return None

    def cancel(self, group: SequenceGroup, samples: set[int]) -> None:
        """Ends these samples (all, if empty) at once; their blocks are free for the next plan."""
        if group.state is State.RUNNING and self._any_slot(group, samples):
            self._cancels.append(self.next_number - len(self._in_flight) - 1)
        for sequence in group.live:
            if not samples or sequence.sample in samples:
                self._end(sequence)

    def fail_running(self, code: str, reason: str) -> None:
        """Ends every running group with an error."""
        for group in list(self.running):
            self.outputs.add_failure(group, code, reason)
            self.cancel(group, set())

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits to come back, or is in flight."""
        return not (self.running or self.preempted or self._in_flight or self._freed_slots)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # -- one iteration: schedule -------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next plan, or None if there is nothing to run or a result must come first."""
        rows = self._make_room()
        if rows is None:
            return None
        draft = Draft(budget=self.shape.max_batched_tokens)
        self._add_decodes(draft, rows)
        self._add_prefills(draft)
        self._admit_from(self.preempted, draft)
        if not self.preempted:
            self._admit_from(self.waiting, draft)
        if not draft.has_rows and (self._in_flight or not self._freed_slots):
            return None
        return self._launch(draft)

    def _make_room(self) -> Int32s | None:
        """The decode rows, once there are blocks for all of them; None: wait for a result first."""
        while True:
            rows = self.slots.decode_rows()
            if self._blocks_wanted(rows) <= self.blocks.free_blocks:
                return rows
            if self._in_flight:
                return None
            self._preempt(max(self.running, key=lambda group: group.key))

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
        draft.decodes = rows
        draft.budget -= len(rows)
        self.slots.computed[rows] += 1
        self.counters.decode_tokens += len(rows)

    def _copy_on_write(self, draft: Draft, slot: int, index: int) -> None:
        copy = self.blocks.copy_on_write(slot, index)
        if copy is not None:
            draft.copies.append(copy)
            draft.entries.append((slot, index, copy[1]))

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
        drawing = group.live if group.is_fresh else [sequence]
        if group.end == len(group.prompt):  # no output is wanted, only scores of the prompt
            draft.ending.extend(drawing)
            return
        for sample in drawing:
            if sample.finished:
                continue
            assert sample.slot is not None
            if sample is not sequence:
                self._fork(draft, sequence, sample)
            draft.draws.append((sample.slot, len(draft.chunks) - 1))
            self.slots.decoding[sample.slot] = True
        if sequence.finished:
            draft.done_with.append(sequence)

    def _fork(self, draft: Draft, parent: Sequence, child: Sequence) -> None:
        assert parent.slot is not None and child.slot is not None
        self.blocks.fork(parent.slot, child.slot)
        self.slots.computed[child.slot] = self.slots.computed[parent.slot]
        self.slots.announced[child.slot] = True
        draft.forks.append((parent.slot, child.slot, child.sample))

    # -- admission and preemption ------------------------------------------------------------------

    def _admit_from(self, queue: OrderedGroups, draft: Draft) -> None:
        """Admits groups in order until one does not fit or the budget is spent."""
        while draft.budget > 0:
            group = queue.first()
            if group is None or not self._has_room(group):
                return
            queue.remove(group)
            self._admit(draft, group)

    def _has_room(self, group: SequenceGroup) -> bool:
        if len(group.live) > self.slots.num_free:
            return False
        spare = int(self.shape.watermark * self.shape.num_blocks) if self.running else 0
        return self._admission_blocks(group) + spare <= self.blocks.free_blocks

    def _admission_blocks(self, group: SequenceGroup) -> int:
        """Blocks that the group's tokens need, its next tokens included."""
        if group.is_fresh:
            return self.blocks.blocks_for(
                min(len(group.prompt) + 1, max(group.end - 1, len(group.prompt)))
            )
        shared = self._shared_tokens(group) // self.shape.block_size
        lengths = [len(group.prompt) + len(sequence.outputs) for sequence in group.live]
        whole = [self.blocks.blocks_for(min(length + 1, group.end - 1)) for length in lengths]
        return shared + sum(blocks - shared for blocks in whole)

    def _shared_tokens(self, group: SequenceGroup) -> int:
        """Tokens in the full prompt blocks that all samples of a group share."""
        return len(group.prompt) // self.shape.block_size * self.shape.block_size

    def _admit(self, draft: Draft, group: SequenceGroup) -> None:
        group.state = State.RUNNING
        self.running.add(group)
        if not group.started:
            group.started = True
            self.outputs.add_started(group, cached_tokens=0)
        if group.is_fresh:
            self._admit_fresh(draft, group)
        else:
            self._admit_with_outputs(draft, group)

    def _admit_fresh(self, draft: Draft, group: SequenceGroup) -> None:
        """One sample prefills the prompt; the others hold slots and fork from it at its end."""
        lead, *others = group.live
        self._give_slot(draft, lead, group.prompt, shared=NO_OUTPUTS)
        for sequence in others:
            self.slots.take(sequence, group.prompt, computed=0)
        self._start_prefill(draft, lead)

    def _admit_with_outputs(self, draft: Draft, group: SequenceGroup) -> None:
        """Each sample recomputes its own tokens; full prompt blocks are computed once and shared."""
        lead, *others = group.live
        self._give_slot(draft, lead, group.history(lead), shared=NO_OUTPUTS)
        self._start_prefill(draft, lead)
        for sequence in others:
            assert lead.slot is not None
            tokens = self._shared_tokens(group)
            prefix = self.blocks.table(lead.slot)[: tokens // self.shape.block_size]
            self._give_slot(draft, sequence, group.history(sequence), shared=prefix)
            sequence.waits_for, sequence.waits_until = lead, tokens
            self._start_prefill(draft, sequence)

    def _give_slot(self, draft: Draft, sequence: Sequence, history: Int32s, shared: Int32s) -> None:
        group = sequence.group
        computed = len(shared) * self.shape.block_size
        slot = self.slots.take(sequence, history, computed)
        blocks = self.blocks.allocate(slot, len(history), shared)
        self.slots.announced[slot] = True
        sequence.target = len(history)
        sequence.waits_for = None
        admit = Admit(
            slot=slot,
            tokens=history,
            prompt_len=len(group.prompt),
            computed=computed,
            blocks=blocks.copy(),
            sample=sequence.sample,
            sampling=group.sampling,
            prompt_logprobs_from=group.prompt_scores_from,
        )
        draft.admits.append(admit)

    def _start_prefill(self, draft: Draft, sequence: Sequence) -> None:
        bisect.insort(self._prefilling, sequence, key=lambda s: (s.group.key, s.sample))
        if draft.budget > 0:
            self._add_chunk(draft, sequence)

    def _preempt(self, group: SequenceGroup) -> None:
        """Takes everything from a group; it comes back by recomputation of all its known tokens."""
        for sequence in group.sequences:
            if sequence.slot is not None:
                self._release(sequence)
        self.running.discard(group)
        group.state = State.PREEMPTED
        self.preempted.add(group)
        self.counters.preemptions += 1

    # -- sending and freeing ------------------------------------------------------------------------

    def _launch(self, draft: Draft) -> Plan:
        plan = draft.plan(self.shape.epoch, self.next_number, self._freed_slots)
        rows = np.concatenate([draft.decodes, plan.draw_slots])
        generation = self.slots.generation
        chunks = [(slot, int(generation[slot])) for slot, _ in draft.chunks]
        self._in_flight.append(_Flight(plan.number, rows, generation[rows], chunks, draft.ending))
        self._count_cancels(plan.number)
        self._freed_slots.clear()
        self.next_number += 1
        self.counters.plans += 1
        for sequence in draft.done_with:
            self._release(sequence)
        return plan

    def _count_cancels(self, number: int) -> None:
        """Notes how many plans ran between each cancel and the plan that frees its slots."""
        for last_done in self._cancels:
            passed = number - last_done - 1
            self.counters.max_cancel_to_free_plans = max(self.counters.max_cancel_to_free_plans, passed)
        self.counters.cancels_freed += len(self._cancels)
        self._cancels.clear()

    def _release(self, sequence: Sequence) -> None:
        """Frees a sequence's slot and blocks: for the next plan, which runs after those in flight."""
        slot = sequence.slot
        assert slot is not None
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.blocks.free(slot)
        if self.slots.announced[slot]:
            self._freed_slots.append(slot)
        self.slots.release(slot)

    def _end(self, sequence: Sequence) -> None:
        """Finishes a sequence, and its group with the last one."""
        sequence.finished = True
        group = sequence.group
        if sequence.slot is not None and not self._is_needed(sequence):
            self._release(sequence)
        if group.live:
            return
        for other in group.sequences:
            if other.slot is not None:
                self._release(other)
        self._leave_queue(group)
        group.state = State.FINISHED
        self.outputs.ended.append(group)

    def _is_needed(self, sequence: Sequence) -> bool:
        """Whether other samples still wait for what this one prefills."""
        return sequence in self._prefilling and bool(sequence.group.live)

    def _leave_queue(self, group: SequenceGroup) -> None:
        if group.state is State.RUNNING:
            self.running.discard(group)
        elif group.state is State.WAITING:
            self.waiting.remove(group)
        elif group.state is State.PREEMPTED:
            self.preempted.remove(group)

    # -- one iteration: process ----------------------------------------------------------------------

    def process(self, result: Result) -> Outputs:
        """Takes in the result of the oldest plan in flight.

        Raises:
            ProtocolError: it is not that plan's result; the gang must be reset.
        """
        flight = self._match(result)
        current = self.slots.generation[flight.rows] == flight.generations
        draws = np.flatnonzero(current).astype(np.int32)
        rows, tokens = flight.rows[draws], result.tokens[draws]
        self.outputs.add_tokens(self.slots, rows, tokens, draws, result.draw_logprobs)
        self._take_prompt_scores(flight, result.prompt_logprobs)
        self.slots.append(rows, tokens)
        self._finish_rows(rows, tokens)
        for sequence in flight.ending:
            if not sequence.finished:
                self._finish(sequence, "length", None)
        return self.take_outputs()

    def take_outputs(self) -> Outputs:
        """What there is to tell the gateways; the next call gives only what is new."""
        outputs, self.outputs = self.outputs, Outputs()
        return outputs

    def _match(self, result: Result) -> _Flight:
        if not self._in_flight or result.number != self._in_flight[0].number:
            raise ProtocolError(f"result.number: {result.number} is not the oldest plan in flight")
        flight = self._in_flight[0]
        if len(result.tokens) != len(flight.rows):
            raise ProtocolError(f"result.tokens: {len(result.tokens)} for {len(flight.rows)} draws")
        return self._in_flight.popleft()

    def _take_prompt_scores(self, flight: _Flight, parts: list[PromptLogprobs]) -> None:
        for part in parts:
            if not 0 <= part.chunk < len(flight.chunks):
                raise ProtocolError("result.prompt_logprobs.chunk: out of range")
            slot, generation = flight.chunks[part.chunk]
            sequence = self.slots.sequences[slot]
            if sequence is None or self.slots.generation[slot] != generation:
                continue
            self.outputs.add_prompt_scores(sequence.group, part)
            sequence.group.prompt_scores_from = part.start + len(part.logprobs)

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
        self.outputs.add_finish(sequence, reason, stop_token)
        self._end(sequence)

    # -- integrity ------------------------------------------------------------------------------

    def _any_slot(self, group: SequenceGroup, samples: set[int]) -> bool:
        return any(
            sequence.slot is not None and (not samples or sequence.sample in samples)
            for sequence in group.live
        )

    def _fit_all(self) -> None:
        """Checks every group that is not running against a new shape."""
        for queue in (self.preempted, self.waiting):
            for group in list(queue):
                reason = self.fit(group)
                if reason is not None:
                    self.outputs.add_failure(group, "INVALID_ARGUMENT", reason)
                    self.cancel(group, set())

    def check(self) -> None:
        """Raises AssertionError unless every block, slot and group is accounted for."""
        self.blocks.check()
        held = [sequence for sequence in self.slots.sequences if sequence is not None]
        assert len(held) + self.slots.num_free == self.slots.num_slots, "a slot is lost"
        assert {sequence.group for sequence in held} == self.running, "a group without slots runs"
        for queue, state in ((self.waiting, State.WAITING), (self.preempted, State.PREEMPTED)):
            assert all(group.state is state for group in queue), f"a {state.value} group is elsewhere"
        assert all(group.state is State.RUNNING for group in self.running)
        if not self.running:
            assert self.blocks.free_blocks == self.blocks.device.total, "blocks are held by nobody"
