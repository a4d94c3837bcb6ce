"""The scheduler of one gang: queues in, one plan per iteration out, results back in.

    plan = scheduler.schedule()        # None: nothing to run, or wait for a result first
    outputs = scheduler.process(result)

A plan holds, in this order of preference: a decode row for every running sequence, chunks of the
prompts that are being prefilled, preempted groups that come back, waiting groups that are admitted.
Groups are admitted, preempted and resumed whole, in the order of their keys. With a plan in flight
the next one is built as if no sequence ended; rows of sequences that did end are dropped when their
result comes.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.controlplane import preemption
from octavo.controlplane.admission import plan_admission
from octavo.controlplane.admitting import Admitting
from octavo.controlplane.beams import advance
from octavo.controlplane.counters import Counters
from octavo.controlplane.draft import Draft, Flight, Pending, Shape
from octavo.controlplane.fit import NeverFits, fit, longest_need
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.rows import Decodes
from octavo.controlplane.sequence import OrderedGroups, Sequence, SequenceGroup, State
from octavo.proto.plan import Plan, PromptLogprobs, Result
from octavo.proto.wire import Int32s, ProtocolError


class Scheduler(Admitting):
    """Decides who runs. `GangState` is what it decides about, `Admitting` how groups come in."""

    def __init__(
        self,
        shape: Shape,
        waiting: OrderedGroups,
        counters: Counters,
        speeds: preemption.Speeds | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(shape, waiting, counters, speeds, number)

    def evacuate(self) -> list[SequenceGroup]:
        """The epoch ends: nothing in either pool counts any more.

        Returns:
            The groups that were here; they wait to be recomputed on any gang. Those that compute a
            registered prefix are dropped: each gang computes it for itself.
        """
        for group in list(self.running):
            self._recompute(group, preemption.LOST)
        groups = [group for group in self.preempted if group.prefix is None]
        self.preempted = OrderedGroups()
        for group in groups:
            self._make_free(group)
        self._start(self.shape)
        return groups

    def begin(self, shape: Shape, speeds: preemption.Speeds) -> None:
        """A new epoch starts, after `evacuate`."""
        self.speeds = speeds
        self._start(shape)

    # -- requests --------------------------------------------------------------------------------

    def fit(self, group: SequenceGroup) -> str | None:
        """Prepares a group for this gang. Returns why it could never run, or None if it can."""
        try:
            end = fit(group, self.shape, self.reserved)
        except NeverFits as error:
            return str(error)
        group.prepare(self.blocks.path(group.cache_salt, group.prompt), end)
        return None

    def refit(self, waiting: OrderedGroups) -> None:
        """Checks all waiting groups against this gang; those that could never run fail."""
        for group in list(waiting):
            reason = self.fit(group)
            if reason is not None:
                waiting.remove(group)
                self.fail(group, "INVALID_ARGUMENT", reason)

    def fail(self, group: SequenceGroup, code: str, reason: str) -> None:
        """Ends a group that is in no queue any more with an error."""
        group.state = State.FINISHED
        self.outputs.add_failure(group, code, reason)
        self.outputs.ended.append(group)

    def compute_prefix(self, group: SequenceGroup) -> None:
        """Takes in a group that fills the blocks of a registered prefix: on this gang, no other."""
        group.state, group.gang = State.PREEMPTED, self.number
        self.preempted.add(group)

    def largest_need(self, waiting: Iterable[SequenceGroup] = ()) -> int:
        """Blocks of the largest accepted group when it is longest.

        Args:
            waiting: groups that wait elsewhere.
        """
        groups = [*self.running, *self.preempted, *self.waiting, *waiting]
        needs = (longest_need(group, self.shape) for group in groups if not group.prefix)
        return max(needs, default=0)

    def cancel(self, group: SequenceGroup, samples: set[int]) -> None:
        """Ends these samples (all, if empty) at once; their blocks are free for the next plan."""
        if group.state is State.RUNNING and self._any_slot(group, samples):
            self._cancels.append(self.next_number - len(self._in_flight) - 1)
        for sequence in group.live:
            if not samples or sequence.sample in samples or group.search is not None:
                self._end(sequence)

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

    def _make_room(self, draft: Draft) -> Decodes | None:
        """The decode rows, once there are blocks for all of them; None: wait for a result first."""
        while True:
            rows = self._decodes(self.slots.decode_rows())
            if rows.wants <= self.blocks.available:
                break
            if self._in_flight:
                return None
            self._preempt(draft, max(self.running, key=lambda group: group.key))
        lower = [] if draft.preempts else self._groups_that_must_yield()
        if lower and self._in_flight:
            return None
        for group in lower:
            self._preempt(draft, group)
        return self._decodes(self.slots.decode_rows()) if lower else rows

    # -- preemption --------------------------------------------------------------------------------

    def _groups_that_must_yield(self) -> list[SequenceGroup]:
        """Running groups of a lower level than the first in line, largest key first, as many as make
        room for it; none if it has room, or would have none all the same."""
        first = self._next_in_line()
        if first is None:
            return []
        lower = self.running.below(first.key.priority)
        if not lower:
            return []
        blocks = self.blocks.available - self._decodes(self.slots.decode_rows()).wants
        slots = self.slots.num_free
        wanted = plan_admission(first, self.blocks).wants + self._spare(anybody_runs=True)
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
        rows = draft.decodes
        if draft.draw_slots:
            rows = np.concatenate([rows, plan.draw_slots])
        chunks = [self._group_in(slot) for slot in draft.chunk_slots]
        tokens = sum(draft.chunk_lengths)
        flight = Flight(plan.number, rows, self.slots.generation[rows], chunks, tokens, draft.ending)
        self._in_flight.append(flight)
        if self._cancels:
            self._count_cancels(plan.number)
        for _, child, _ in self.pending.forks:
            self.slots.announced[child] = True
        self.pending = Pending()
        self.next_number += 1
        self.counters.plans += 1
        if chunks:
            self._index_chunks(draft.chunk_slots, chunks)
        for sequence in draft.done_with:
            self._release(sequence)
        self._count_sharing()
        return plan

    def _index_chunks(self, slots: list[int], groups: list[SequenceGroup]) -> None:
        """Makes the blocks of these chunks findable: the plan that fills them is on its way."""
        paths = [group.path for group in groups]
        self.blocks.extend_index(slots, self.slots.computed[slots], self.slots.tokens, paths)

    def _count_sharing(self) -> None:
        held = self.blocks.device.total - self.blocks.available
        if held:
            self.counters.sharing_ratio_sum += self.blocks.num_entries / held
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
        draws = current & ~self.slots.searching[flight.rows] if self.slots.num_searching else current
        if result.candidates is not None:
            self._take_candidates(flight, result, current)
        rows, tokens = flight.rows[draws], result.tokens[draws]
        fields = self.slots.fields(rows)
        self.outputs.add_tokens(self.slots.gateway[rows], fields, tokens, draws, result.draw_logprobs)
        self._take_prompt_scores(flight, result.prompt_logprobs)
        known = self.slots.append(rows, tokens)
        self._index_generated(rows, np.minimum(known, fields.computed))
        stopped = self.slots.stopped(rows, tokens, fields.eos)
        ending = (stopped | (known >= fields.end)).nonzero()[0]
        if len(ending):
            self._finish_rows(rows[ending], stopped[ending], tokens[ending])
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

    def _index_generated(self, rows: Int32s, there: Int32s) -> None:
        """Makes blocks findable that generation has filled, for the next turn of a chat.

        Args:
            there: tokens of each row that are known, and whose KV is planned or there.
        """
        if self.blocks.index is None:
            return
        full = there // self.shape.block_size > self.blocks.indexed[rows]
        slots = rows[full].tolist()
        if slots:
            self.blocks.extend_index(slots, there[full], self.slots.tokens, [None] * len(slots))

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

    def _finish_rows(self, rows: Int32s, stopped: NDArray[np.bool_], tokens: Int32s) -> None:
        """The sequences of these rows end with these tokens, which stop them or are their last."""
        singles = []
        for slot, is_stop, token in zip(rows.tolist(), stopped.tolist(), tokens.tolist(), strict=True):
            sequence = self.slots.sequences[slot]
            assert sequence is not None
            reason, stop_token = ("stop", token) if is_stop else ("length", None)
            if len(sequence.group.sequences) == 1 and sequence.group.prefix is None:
                self.outputs.add_finish(sequence.group, sequence.sample, reason, stop_token)
                singles.append(sequence)
            else:
                self._finish(sequence, reason, stop_token)
        if singles:
            self._end_singles(singles)

    def _finish(self, sequence: Sequence, reason: str, stop_token: int | None) -> None:
        if sequence.group.prefix is None:
            self.outputs.add_finish(sequence.group, sequence.sample, reason, stop_token)
        self._end(sequence)
