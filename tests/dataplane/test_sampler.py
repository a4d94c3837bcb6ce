"""Draws through the slots: the rules of Hugging Face's processors, one step at a time."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from octavo.dataplane.sampler import draw, score
from octavo.dataplane.slots import Slots
from octavo.kernels.table import CPU
from octavo.proto.plan import Admit, Sampling
from octavo.proto.wire import float32s, int32s

VOCAB = 200


def slots_with(*entries: tuple[list[int], int, Sampling]) -> Slots:
    """Slots 0, 1, ... with tokens, prompt length and parameters."""
    slots = Slots(len(entries), 64, 4, VOCAB)
    for slot, (tokens, prompt_len, sampling) in enumerate(entries):
        slots.admit(
            Admit(
                slot=slot,
                tokens=int32s(tokens),
                prompt_len=prompt_len,
                computed=0,
                blocks=int32s([slot]),
                sample=0,
                sampling=sampling,
            )
        )
    return slots


def draw_all(logits: torch.Tensor, slots: Slots) -> list[int]:
    everyone = np.arange(slots.num_slots, dtype=np.int32)
    return [int(token) for token in draw(logits, slots, everyone, CPU).result().tokens]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("penalty", [0.6, 1.3, 2.5])
def test_repetition_counts_prompt_and_output_as_hugging_face(penalty: float) -> None:
    processor: LogitsProcessor = RepetitionPenaltyLogitsProcessor(penalty)
    tokens = [5, 9, 9, 40]
    sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
    slots = slots_with((tokens, 3, sampling))
    for step in range(30):
        raw = logits(1, step)
        wanted = int(processor(torch.tensor([tokens]), raw.clone()).argmax())
        assert draw_all(raw, slots) == [wanted]
        tokens.append(wanted)
        slots.append(int32s([0]), int32s([wanted]))


def test_presence_and_frequency_count_output_only() -> None:
    prompt, outputs = [7, 7, 8], [3, 3, 3, 4]
    sampling = Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    slots = slots_with((prompt + outputs, 3, sampling))
    row = torch.full((1, VOCAB), -10.0)
    row[0, [3, 4, 7]] = torch.tensor([2.0, 1.5, 0.78])  # 3 loses 1.25, 4 loses 0.75, 7 nothing
    assert draw_all(row, slots) == [7]
    row[0, 3] = 2.04
    assert draw_all(row, slots) == [3]
    row[0, 4] = 1.56
    assert draw_all(row, slots) == [4]


def test_bias_moves_its_tokens_only() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 50] = 3.0
    for value, wanted in ((2.9, 50), (3.1, 60)):
        sampling = Sampling(
            temperature=0.0, bias_ids=int32s([60, 61]), bias_values=float32s([value, -5])
        )
        assert draw_all(row, slots_with(([1], 1, sampling))) == [wanted]
    assert float(row[0, 60]) == 0.0  # the raw logits stay as they are


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_endings_wait_for_min_tokens(ignore_eos: bool) -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 2], row[0, 3], row[0, 11], row[0, 30] = 9.0, 8.0, 7.0, 6.0
    sampling = Sampling(
        temperature=0.0,
        min_tokens=3,
        ignore_eos=ignore_eos,
        eos_token_ids=int32s([2, 3]),
        stop_token_ids=int32s([11]),
    )
    slots = slots_with(([1, 1], 2, sampling))
    before = [2, 2, 2] if ignore_eos else [30, 30, 30]
    found = []
    for _ in range(4):
        found += draw_all(row, slots)
        slots.append(int32s([0]), int32s(found[-1:]))
    assert found == [*before, 2]
    row[0, 2] = row[0, 3] = -9.0
    late, early = slots_with(([1, 5, 5, 5], 1, sampling)), slots_with(([1, 5, 5], 1, sampling))
    assert draw_all(row, late) == [11]
    assert draw_all(row, early) == [30]


def test_rows_of_all_kinds_draw_what_they_draw_alone() -> None:
    kinds = [
        Sampling(temperature=0.0),
        Sampling(temperature=1e-7, top_p=1e-6),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.9, top_k=4, top_p=0.9, min_p=0.01, seed=2**64 - 1),
        Sampling(temperature=0.0, repetition_penalty=3.0),
        Sampling(temperature=2.0, seed=8, bias_ids=int32s([4]), bias_values=float32s([-100])),
        Sampling(temperature=1.0, seed=3, min_tokens=9, eos_token_ids=int32s(range(VOCAB - 1))),
    ]
    rows = logits(len(kinds))
    entries = [([4, 5, 6], 2, kind) for kind in kinds]
    together = draw_all(rows, slots_with(*entries))
    alone = [draw_all(rows[i : i + 1], slots_with(entry))[0] for i, entry in enumerate(entries)]
    assert together == alone
    assert together[:2] == rows[:2].argmax(dim=1).tolist()
    assert together[-1] == VOCAB - 1  # the only token that is left


def test_a_draw_depends_on_seed_position_and_sample_not_on_the_slot() -> None:
    kind = Sampling(temperature=1.0, seed=6)
    row = torch.zeros(1, VOCAB)
    base = draw_all(row, slots_with(([1, 2], 1, kind)))
    assert base == draw_all(row.expand(2, -1), slots_with(([9], 1, kind), ([1, 2], 2, kind)))[1:]
    other = slots_with(([1, 2], 1, kind))
    other.samples[0] = 1
    longer = slots_with(([1, 2, 3], 1, kind))
    reseeded = slots_with(([1, 2], 1, Sampling(temperature=1.0, seed=7)))
    assert len({tuple(base), *(tuple(draw_all(row, s)) for s in (other, longer, reseeded))}) == 4


def test_reported_log_probabilities_are_of_the_raw_distribution() -> None:
    rows = logits(1)
    sampling = Sampling(
        temperature=3.0, top_k=2, logprobs=3, bias_ids=int32s([17]), bias_values=float32s([100])
    )
    drawn = draw(rows, slots_with(([1], 1, sampling)), np.zeros(1, dtype=np.int32), CPU).result()
    assert drawn.tokens.tolist() == [17]
    wanted = torch.log_softmax(rows[0], dim=-1)
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprobs.tolist() == pytest.approx([float(wanted[17])], abs=1e-5)
    assert drawn.logprobs.top_ids.tolist() == wanted.topk(3).indices.tolist()
    assert drawn.logprobs.top_logprobs.tolist() == pytest.approx(
        wanted.topk(3).values.tolist(), abs=1e-5
    )


def test_more_best_tokens_than_the_vocabulary_has_are_all_of_them() -> None:
    rows = logits(1)
    sampling = Sampling(temperature=0.0, logprobs=10_000)
    drawn = draw(rows, slots_with(([1], 1, sampling)), np.zeros(1, dtype=np.int32), CPU).result()
    assert drawn.logprobs is not None
    assert drawn.logprobs.top_counts.tolist() == [VOCAB]


def test_score_without_best_tokens() -> None:
    rows, tokens = logits(3), torch.tensor([0, 5, VOCAB - 1])
    own, ids, best = score(rows, tokens, 0, CPU)
    wanted = torch.log_softmax(rows.double(), dim=-1).gather(1, tokens[:, None]).squeeze(1)
    assert own.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    assert ids.shape == best.shape == (3, 0)
