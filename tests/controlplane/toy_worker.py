"""A worker that computes nothing, and notices everything.

Its KV pool holds token ids. The next token of a sequence is a hash of all the tokens that it reads
through its block table, of the seed and of the sample: a wrong table, a missing copy-on-write, a
block given out too early or a lost token changes every token that follows.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from octavo.controlplane.draft import Shape
from octavo.proto.plan import Admit, Candidates, Plan, PromptLogprobs, Result, Sampling, Timings
from octavo.proto.wire import float32s, int32s

VOCAB = 50


def next_token(history: list[int], sampling: Sampling, sample: int) -> int:
    """The token that follows `history`, by decree."""
    text = bytes(str((history, sampling.seed, sample)), "ascii")
    return zlib.crc32(text) % VOCAB


def best_continuations(history: list[int], sampling: Sampling) -> list[tuple[int, float]]:
    """The best tokens after `history` and their log-probabilities, by decree."""
    chance = np.random.default_rng(zlib.crc32(bytes(str((history, sampling.seed)), "ascii")))
    logits = chance.normal(size=VOCAB) * 2
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    best = np.argsort(-logprobs, kind="stable")[: sampling.candidates]
    return [(int(token), float(logprobs[token])) for token in best]


def expected_outputs(
    prompt: list[int], sampling: Sampling, sample: int, end: int, stops: set[int]
) -> list[int]:
    """What a sample must produce: alone, with no limit on memory."""
    tokens = list(prompt)
    while len(tokens) < end:
        tokens.append(next_token(tokens, sampling, sample))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@dataclass
class _Slot:
    tokens: list[int]
    computed: int
    table: list[int]
    sample: int
    sampling: Sampling
    prompt_len: int
    scores_from: int


@dataclass
class ToyWorker:
    """Runs the plans of one epoch, in order."""

    shape: Shape
    slots: dict[int, _Slot] = field(default_factory=dict)
    next_number: int = 0

    def __post_init__(self) -> None:
        self.pool = np.full((self.shape.num_blocks, self.shape.block_size), -1)
        self.swap = np.full((self.shape.num_cpu_blocks, self.shape.block_size), -1)

    def run(self, frame: bytes) -> Result:
        plan = Plan.unpack(frame)
        assert (plan.epoch, plan.number) == (self.shape.epoch, self.next_number)
        self.next_number += 1
        plan.validate(self.shape.num_slots, self.shape.num_blocks, self.shape.num_cpu_blocks)
        self._check_disjoint(plan)
        self._apply(plan)
        return self._compute(plan)

    def _check_disjoint(self, plan: Plan) -> None:
        sources, destinations = plan.copies[0::2].tolist(), plan.copies[1::2].tolist()
        assert not set(sources) & set(destinations), "a copy reads what another writes"
        assert len(set(destinations)) == len(destinations)
        arrived = plan.swap_in[1::2].tolist()
        assert len({*arrived, *destinations}) == len(arrived) + len(destinations)
        stored, fetched = plan.swap_out[1::2].tolist(), plan.swap_in[0::2].tolist()
        assert len(set(stored)) == len(stored) and not set(stored) & set(fetched)
        assert len(set(plan.free_slots.tolist())) == len(plan.free_slots)
        assert len(plan.decode_slots) + plan.chunk_lengths.sum() <= self.shape.max_batched_tokens
        rows = plan.decode_slots.tolist() + plan.chunk_slots.tolist()
        assert len(set(rows)) == len(rows), "a slot has two rows"

    def _apply(self, plan: Plan) -> None:
        for block, cpu_block in plan.swap_out.reshape(-1, 2).tolist():
            self.swap[cpu_block] = self.pool[block]
        for cpu_block, block in plan.swap_in.reshape(-1, 2).tolist():
            self.pool[block] = self.swap[cpu_block]
        for source, destination in plan.copies.reshape(-1, 2).tolist():
            self.pool[destination] = self.pool[source]
        for slot in plan.free_slots.tolist():
            del self.slots[slot]
        for admit in plan.admits:
            assert admit.slot not in self.slots, "a slot in use is admitted to"
            self.slots[admit.slot] = self._slot(admit)
        for parent, child, sample in plan.forks.reshape(-1, 3).tolist():
            old = self.slots[parent]
            assert child not in self.slots, "a slot in use is forked to"
            self.slots[child] = _Slot(
                list(old.tokens),
                old.computed,
                list(old.table),
                sample,
                old.sampling,
                old.prompt_len,
                old.scores_from,
            )
        entries = zip(plan.table_slots, plan.table_indices, plan.table_blocks, strict=True)
        for slot, index, block in entries:
            table = self.slots[int(slot)].table
            table[int(index) : int(index) + 1] = [int(block)]
        for slot, token in zip(plan.push_slots.tolist(), plan.push_tokens.tolist(), strict=True):
            self.slots[slot].tokens.append(token)

    def _slot(self, admit: Admit) -> _Slot:
        return _Slot(
            admit.tokens.tolist(),
            admit.computed,
            admit.blocks.tolist(),
            admit.sample,
            admit.sampling,
            admit.prompt_len,
            admit.prompt_logprobs_from,
        )

    def _compute(self, plan: Plan) -> Result:
        lengths = zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True)
        rows = [(slot, 1) for slot in plan.decode_slots.tolist()] + list(lengths)
        starts = {slot: self.slots[slot].computed for slot, _ in rows}
        written: dict[tuple[int, int], tuple[int, ...]] = {}
        for slot, length in rows:  # every write comes before every read
            self._write(slot, length, written)
        scores = self._prompt_scores(plan, starts)
        chunks = plan.chunk_slots.tolist()
        draws = [(slot, slot) for slot in plan.decode_slots.tolist()]
        for slot, chunk in zip(plan.draw_slots.tolist(), plan.draw_chunks.tolist(), strict=True):
            self.slots[slot].computed = self.slots[chunks[chunk]].computed
            draws.append((chunks[chunk], slot))
        tokens, candidates = self._draw_all(draws)
        return Result(
            epoch=plan.epoch,
            number=plan.number,
            rank=0,
            tokens=int32s(tokens),
            candidates=candidates,
            prompt_logprobs=scores,
            timings=Timings(forward=0.01),
        )

    def _draw_all(self, draws: list[tuple[int, int]]) -> tuple[list[int], Candidates | None]:
        tokens: list[int] = []
        asked: list[int] = []
        ids: list[int] = []
        logprobs: list[float] = []
        for index, (row, slot) in enumerate(draws):
            state, read = self.slots[slot], self._read(row)
            assert read == self.slots[row].tokens[: self.slots[row].computed], "the cache is wrong"
            if not state.sampling.candidates:
                tokens.append(next_token(read, state.sampling, state.sample))
                continue
            best = best_continuations(read, state.sampling)
            tokens.append(best[0][0])
            asked.append(index)
            ids += [token for token, _ in best]
            logprobs += [logprob for _, logprob in best]
        for index, (_, slot) in enumerate(draws):
            if index not in asked:
                self.slots[slot].tokens.append(tokens[index])
        if not asked:
            return tokens, None
        counts = [self.slots[draws[index][1]].sampling.candidates for index in asked]
        return tokens, Candidates(
            draws=int32s(asked), counts=int32s(counts), ids=int32s(ids), logprobs=float32s(logprobs)
        )

    def _write(self, slot: int, length: int, written: dict[tuple[int, int], tuple[int, ...]]) -> None:
        state = self.slots[slot]
        for position in range(state.computed, state.computed + length):
            place = state.table[position // self.shape.block_size], position % self.shape.block_size
            history = tuple(state.tokens[: position + 1])
            assert written.setdefault(place, history) == history, "two rows write one place"
            self.pool[place] = state.tokens[position]
        state.computed += length

    def _read(self, slot: int) -> list[int]:
        state = self.slots[slot]
        blocks = self.pool[state.table].reshape(-1)
        return [int(token) for token in blocks[: state.computed]]

    def _prompt_scores(self, plan: Plan, starts: dict[int, int]) -> list[PromptLogprobs]:
        scores = []
        for chunk, slot in enumerate(plan.chunk_slots.tolist()):
            state = self.slots[slot]
            first = max(starts[slot] + 1, state.scores_from, 1)
            last = min(state.computed + 1, state.prompt_len)
            if state.sampling.prompt_logprobs is not None and first < last:
                values = float32s([-state.tokens[position] for position in range(first, last)])
                scores.append(PromptLogprobs(chunk=chunk, start=first, logprobs=values))
        return scores
