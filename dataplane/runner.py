"""Runs plans: apply the changes, compute the rows, draw the tokens, answer."""

import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from octavo.dataplane.batching import Rows, batch_of, rows_of
from octavo.dataplane.engine import Batch, Engine
from octavo.dataplane.host_copy import HostCopy
from octavo.dataplane.sampler import Drawing, draw, score
from octavo.dataplane.slots import Ints, Places, PlanError, Slots
from octavo.dataplane.stopwatch import Stopwatch
from octavo.kernels.table import Kernels
from octavo.proto.plan import Plan, PromptLogprobs, Result, Timings
from octavo.proto.wire import float32s, int32s

# Logits of prompt tokens are taken this many rows at a time, so that a long prompt's do not all lie
# in memory at once (a row of 50,000 tokens is 200 kB).
SCORE_ROWS = 64


@dataclass(frozen=True)
class ScoreRange:
    """Prompt tokens first .. last of a chunk's slot whose log-probabilities are wanted."""

    chunk: int
    slot: int
    first: int  # position of the first token; the logits one position before it are about it
    last: int  # half-open
    token: int  # index in the batch of the token at position first - 1


@dataclass
class UnderWay:
    """A plan that the device may still be running."""

    plan: Plan
    drawing: Drawing | None
    places: Places  # where the drawn tokens go
    own: np.ndarray[tuple[int], np.dtype[np.intp]]  # which draws they are: beams get theirs later
    scores: list[PromptLogprobs]
    watch: Stopwatch
    timings: Timings


class Runner:
    """Owns the slots of one epoch; the engine owns the pools.

    On a device that works by itself a plan can be started while the one before it is under way:

        first = runner.start(plan)
        if runner.can_start(next_plan):
            second = runner.start(next_plan)
        result = runner.finish(first)
    """

    def __init__(self, engine: Engine, kernels: Kernels, slots: Slots, max_batched_tokens: int) -> None:
        self._engine, self._kernels = engine, kernels
        self._slots, self._max_batched_tokens = slots, max_batched_tokens
        self._device = torch.device(engine.describe().device)
        self._latest: UnderWay | None = None

    def run(self, plan: Plan, rank: int) -> Result:
        """Runs one plan. Raises PlanError when it does not fit the slots."""
        return self.finish(self.start(plan), rank)

    def can_start(self, plan: Plan) -> bool:
        """Whether nothing in the plan depends on tokens that have not reached the host."""
        if not self._engine.overlaps or len(plan.forks) or len(plan.push_slots):
            return False
        drawn = np.concatenate((plan.decode_slots, plan.draw_slots))
        return not (self._slots.late[drawn] & self._slots.draws.edits[drawn]).any()

    def start(self, plan: Plan) -> UnderWay:
        """Hands a plan to the device. Raises PlanError when it does not fit the slots."""
        timings = Timings()
        with _timed(timings, "apply"), _profiled("octavo.apply"):
            self._apply(plan)
            rows = rows_of(plan, self._slots, self._max_batched_tokens)
            drawn, draw_rows = self._draws(plan, rows)
            ranges = self._score_ranges(plan, rows)
        watch = Stopwatch(self._device)
        with _profiled("octavo.forward"):
            logits, to_score = self._forward(rows, draw_rows, ranges)
        watch.stop()
        with _timed(timings, "sample"), _profiled("octavo.sample"):
            drawing = draw(logits, self._slots, drawn, self._kernels) if len(drawn) else None
            scores = self._score(to_score, ranges)
        self._advance(plan)
        own = np.flatnonzero(self._slots.draws.candidates[drawn] == 0)
        places = self._slots.reserve(drawn[own])
        self._latest = UnderWay(plan, drawing, places, own, scores, watch, timings)
        return self._latest

    def finish(self, under_way: UnderWay, rank: int) -> Result:
        """Waits for a plan, in the order of their starts."""
        plan, timings = under_way.plan, under_way.timings
        result = Result(epoch=plan.epoch, number=plan.number, rank=rank, timings=timings)
        with _timed(timings, "sample"):
            if under_way.drawing is not None:
                draws = under_way.drawing.result()
                result.tokens, result.draw_logprobs = draws.tokens, draws.logprobs
                result.candidates = draws.candidates
        self._slots.settle(under_way.places, result.tokens[under_way.own])
        result.digest = zlib.crc32(result.tokens.tobytes())
        result.prompt_logprobs = under_way.scores
        if rank:  # all ranks know the same, and one says it
            result.draw_logprobs = result.candidates = None
            result.prompt_logprobs = []
        timings.forward = under_way.watch.seconds()
        if self._latest is under_way:
            self._latest = None
        return result

    # -- apply ----------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        """The changes, in the order in which `Plan` declares them."""
        if len(plan.swap_out):
            self._engine.swap_out(plan.swap_out)
        if len(plan.swap_in):
            self._engine.swap_in(plan.swap_in)
        if len(plan.copies):
            self._engine.copy_blocks(plan.copies)
        if len(plan.free_slots):
            self._slots.free(plan.free_slots)
        for admit in plan.admits:
            self._slots.admit(admit)
        for parent, child, sample in plan.forks.reshape(-1, 3).tolist():
            self._slots.fork(parent, child, sample)
        entries = (plan.table_slots, plan.table_indices, plan.table_blocks)
        for slot, index, block in zip(*(part.tolist() for part in entries), strict=True):
            self._slots.set_block(slot, index, block)
        if len(plan.push_slots):
            self._slots.push(plan.push_slots, plan.push_tokens)

    # -- execute --------------------------------------------------------------------------------

    def _draws(self, plan: Plan, rows: Rows) -> tuple[Ints, Ints]:
        """The slots to draw for, and the row whose last position each draw is from."""
        drawn, draw_rows = plan.decode_slots, np.arange(rows.num_decodes, dtype=np.int32)
        if len(plan.draw_slots):
            drawn = np.concatenate((drawn, plan.draw_slots))
            draw_rows = np.concatenate((draw_rows, rows.num_decodes + plan.draw_chunks))
            if len(set(drawn.tolist())) != len(drawn):  # of the decodes `rows_of` knows
                raise PlanError("draws: a slot occurs twice")
        ready = self._slots.live[drawn] & (self._slots.lengths[drawn] == rows.ends[draw_rows])
        if not ready.all():
            raise PlanError(
                f"draws: the chunk of slot {int(drawn[np.argmin(ready)])} ends before its tokens"
            )
        return drawn, draw_rows

    def _forward(self, rows: Rows, draw_rows: Ints, ranges: list[ScoreRange]) -> tuple[Tensor, Tensor]:
        """Logits of the draws, and final hidden states of the prompt tokens to score."""
        if not len(rows.slots):
            return torch.empty(0), torch.empty(0)
        scored = [np.arange(r.token, r.token + r.last - r.first, dtype=np.int32) for r in ranges]
        logit_tokens = np.concatenate((rows.last_tokens()[draw_rows], *scored))
        batch = batch_of(rows, self._slots, logit_tokens)
        hidden = self._engine.forward(self._with_late_tokens(batch, rows))
        draws = len(draw_rows)
        return self._engine.logits(hidden[:draws]), hidden[draws:]

    def _with_late_tokens(self, batch: Batch, rows: Rows) -> Batch:
        """The batch with the tokens that the plan under way draws for its rows."""
        late = np.flatnonzero(self._slots.late[rows.slots])
        if not len(late):
            return batch
        latest = self._latest
        assert latest is not None and latest.drawing is not None, (
            "a token is late, but under way nowhere"
        )
        draw_of = dict(zip(latest.places.slots.tolist(), latest.own.tolist(), strict=True))
        draws = [draw_of[slot] for slot in rows.slots[late].tolist()]
        values = latest.drawing.tokens[torch.tensor(draws, device=self._device)]
        return replace(batch, late_tokens=rows.last_tokens()[late], late_values=values.long())

    def _advance(self, plan: Plan) -> None:
        """Counts what the rows computed; a child forked from a chunk's slot shares its blocks."""
        computed = self._slots.computed
        computed[plan.decode_slots] += 1
        if not len(plan.chunk_slots):
            return
        computed[plan.chunk_slots] += plan.chunk_lengths
        advanced = set(plan.chunk_slots.tolist())
        for parent, child, _ in plan.forks.reshape(-1, 3).tolist():
            if parent in advanced and child not in advanced:
                computed[child] = computed[parent]
                advanced.add(child)

    # -- prompt log-probabilities -----------------------------------------------------------------

    def _score_ranges(self, plan: Plan, rows: Rows) -> list[ScoreRange]:
        slots = self._slots
        ranges = []
        for chunk, slot in enumerate(plan.chunk_slots.tolist()):
            if slots.sampling(slot).prompt_logprobs is None:
                continue
            row = rows.chunk(chunk)
            start, end = int(rows.starts[row]), int(rows.ends[row])
            first = max(1, int(slots.prompt_logprobs_from[slot]), start + 1)
            last = min(int(slots.prompt_lens[slot]), end + 1)
            if first < last:
                token = int(rows.query_begins[row]) + first - 1 - start
                ranges.append(ScoreRange(chunk, slot, first, last, token))
        return ranges

    def _score(self, hidden: Tensor, ranges: list[ScoreRange]) -> list[PromptLogprobs]:
        answers, begin = [], 0
        for wanted in ranges:
            end = begin + wanted.last - wanted.first
            answers.append(self._score_range(hidden[begin:end], wanted))
            begin = end
        return answers

    def _score_range(self, hidden: Tensor, wanted: ScoreRange) -> PromptLogprobs:
        k = self._slots.sampling(wanted.slot).prompt_logprobs or 0
        targets = self._slots.tokens[wanted.slot, wanted.first : wanted.last]
        parts = []
        for begin in range(0, len(targets), SCORE_ROWS):
            logits = self._engine.logits(hidden[begin : begin + SCORE_ROWS])
            k = min(k, logits.shape[1])
            tokens = torch.from_numpy(targets[begin : begin + SCORE_ROWS]).to(logits.device)
            parts.append(HostCopy(score(logits, tokens, k, self._kernels)).wait())
        own, ids, best = (np.concatenate(values) for values in zip(*parts, strict=True))
        return PromptLogprobs(
            chunk=wanted.chunk,
            start=wanted.first,
            logprobs=float32s(own),
            top_count=k,
            top_ids=int32s(ids),
            top_logprobs=float32s(best),
        )


def _profiled(name: str) -> AbstractContextManager[object]:
    """A range of torch's profiler; without one it would cost as much as a small operation."""
    return record_function(name) if _profiler_enabled() else nullcontext()


@contextmanager
def _timed(timings: Timings, phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    setattr(timings, phase, getattr(timings, phase) + time.perf_counter() - begin)
