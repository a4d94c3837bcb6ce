import math

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import sampling as cpu
from octavo.kernels.reference import sampling as reference
from octavo.kernels.reference.philox import gumbel_noise
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.table import CPU, REFERENCE, Kernels, native_kernels

BOTH = pytest.mark.parametrize(
    "kernels", [REFERENCE, CPU, native_kernels()], ids=["reference", "cpu", "native"]
)
VOCAB = 1003


def params(rows: int, **given: object) -> DrawParams:
    def filled(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(given.get(name, default), dtype=dtype).expand(rows).clone()

    return DrawParams(
        temperature=filled("temperature", 1.0, torch.float32),
        top_k=filled("top_k", 0, torch.int64),
        top_p=filled("top_p", 1.0, torch.float64),
        min_p=filled("min_p", 0.0, torch.float64),
        seeds=filled("seeds", 12345, torch.int64),
        positions=torch.arange(rows),
        samples=torch.zeros(rows, dtype=torch.int64),
    )


def logits(rows: int, spread: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * spread


def plain_kept(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition of each limit, one token at a time."""
    scaled = row.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = [i for i in range(len(row)) if weights[i] >= min_p]
    kept.sort(key=lambda i: (-row[i], i))
    kept = kept[:top_k] if top_k else kept
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weights[token]
        if top_p < 1 and mass >= top_p * total:
            break
    return set(nucleus)


LIMITS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.05),
    (2.0, 40, 0.9, 0.02),
    (5.0, 700, 0.999, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.0, 2000, 1.0, 0.0),
]


@BOTH
@pytest.mark.parametrize("limits", LIMITS)
def test_draws_the_noisiest_of_those_that_the_definition_keeps(
    kernels: Kernels, limits: tuple[float, int, float, float]
) -> None:
    temperature, top_k, top_p, min_p = limits
    rows = logits(40)
    given = params(40, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    everything = torch.arange(VOCAB).expand(40, -1)
    noise = gumbel_noise(given.seeds, given.positions, given.samples, everything).numpy()
    wanted = []
    for row, its_noise in zip(rows.numpy(), noise, strict=True):
        kept = plain_kept(row, temperature, top_k, top_p, min_p)
        wanted.append(max(sorted(kept), key=lambda i: row[i] / temperature + its_noise[i]))
    assert kernels.sample(rows, given).tolist() == wanted


@pytest.mark.parametrize("limits", LIMITS)
def test_cpu_equals_the_reference_on_a_large_flat_vocabulary(
    limits: tuple[float, int, float, float],
) -> None:
    rows = logits(12, spread=0.5, vocab=20_000)
    given = params(12, **dict(zip(("temperature", "top_k", "top_p", "min_p"), limits, strict=True)))
    assert cpu.sample(rows, given).tolist() == reference.sample(rows, given).tolist()


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-7, 1e-5])
@pytest.mark.parametrize("top_p", [1.0, 1e-6])
def test_tiny_temperatures_are_greedy(kernels: Kernels, temperature: float, top_p: float) -> None:
    rows = logits(30)
    rows[3, 10:] = float("-inf")
    rows[4, :] = float("-inf")
    rows[4, 77] = -5.0
    rows[5] *= 1e4
    found = kernels.sample(rows, params(30, temperature=temperature, top_p=top_p))
    assert found.tolist() == rows.argmax(dim=1).tolist()


@BOTH
def test_rows_do_not_affect_one_another(kernels: Kernels) -> None:
    rows = logits(8)
    rows[2, 100:] = float("-inf")
    rows[6] = float("-inf")  # nothing is possible: still no NaN and a token of the vocabulary
    given = params(
        8,
        temperature=[0.0, 1.0, 0.5, 1e-38, 1.0, 2.0, 1.0, 0.0],
        top_k=[0, 0, 5, 0, 3, 0, 0, 0],
        top_p=[1.0, 0.5, 1.0, 1e-6, 0.9, 1.0, 1.0, 0.2],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0],
    )
    together = kernels.sample(rows, given).tolist()
    alone = [
        int(kernels.sample(rows[i : i + 1], given.rows(torch.tensor([i])))) for i in range(len(rows))
    ]
    assert together == alone
    assert all(0 <= token < VOCAB for token in together)


@BOTH
def test_masked_tokens_are_never_drawn(kernels: Kernels) -> None:
    rows = torch.zeros(200, 50)
    rows[:, 3:] = float("-inf")
    assert set(kernels.sample(rows, params(200)).tolist()) == {0, 1, 2}


@BOTH
def test_ties_go_to_the_lower_id(kernels: Kernels) -> None:
    rows = torch.zeros(1, VOCAB)
    assert int(kernels.sample(rows, params(1, temperature=0.0))) == 0
    rows[0, [90, 40, 700]] = 2.0
    for limit in ({"top_k": 1}, {"top_p": 1e-9}):
        assert int(kernels.sample(rows, params(1, **limit))) == 40


@BOTH
@pytest.mark.parametrize("limit", [{}, {"top_k": 3}, {"top_p": 0.85}])
def test_frequencies_fit_the_softmax(kernels: Kernels, limit: dict[str, float]) -> None:
    draws, temperature = 5_000, 0.8
    row = torch.tensor([2.0, 1.0, 0.0, -0.5, 1.5, -3.0, 0.2])
    given = params(draws, temperature=temperature, **limit)
    counts = np.bincount(kernels.sample(row.expand(draws, -1), given).numpy(), minlength=7)
    kept = plain_kept(
        row.numpy(), temperature, int(limit.get("top_k", 0)), limit.get("top_p", 1.0), 0.0
    )
    weights = np.array([math.exp(float(row[i]) / temperature) * (i in kept) for i in range(7)])
    expected = draws * weights / weights.sum()
    assert counts[weights == 0].sum() == 0
    chi_square = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[weights > 0].sum()
    assert chi_square < 24.0  # 6 degrees of freedom: exceeded with probability 5e-4


@BOTH
def test_seed_position_and_sample_each_change_the_draw(kernels: Kernels) -> None:
    rows = torch.zeros(1, VOCAB).expand(50, -1)
    base = params(50)
    other_seed = params(50, seeds=54321)
    drawn = {
        tuple(kernels.sample(rows, base).tolist()),
        tuple(kernels.sample(rows, other_seed).tolist()),
    }
    moved = DrawParams(**{**vars(base), "samples": torch.ones(50, dtype=torch.int64)})
    shifted = DrawParams(**{**vars(base), "positions": torch.arange(50) + 1000})
    drawn |= {
        tuple(kernels.sample(rows, moved).tolist()),
        tuple(kernels.sample(rows, shifted).tolist()),
    }
    assert len(drawn) == 4


@BOTH
def test_top_ids_are_best_first(kernels: Kernels) -> None:
    rows = logits(4)
    found = kernels.top_ids(rows, 6)
    for row, ids in zip(rows.tolist(), found.tolist(), strict=True):
        assert ids == sorted(range(VOCAB), key=lambda i: -row[i])[:6]
    assert kernels.top_ids(rows, 0).shape == (4, 0)


def test_edits_touch_single_entries() -> None:
    rows = torch.tensor([[1.0, -2.0, 3.0], [1.0, -2.0, 3.0]])
    index = torch.tensor([1, 1]), torch.tensor([0, 1])
    reference.penalize_repetition(rows, *index, torch.tensor(2.0))
    assert rows.tolist() == [[1.0, -2.0, 3.0], [0.5, -4.0, 3.0]]
    reference.penalize_output(rows, *index, torch.tensor([1, 3]), torch.tensor(0.5), torch.tensor(0.25))
    assert rows.tolist() == [[1.0, -2.0, 3.0], [-0.25, -5.25, 3.0]]
    reference.add_bias(rows, *index, torch.tensor([1.0, 2.0]))
    assert rows.tolist() == [[1.0, -2.0, 3.0], [0.75, -3.25, 3.0]]
    reference.forbid(rows, *index)
    assert rows.tolist() == [[1.0, -2.0, 3.0], [-math.inf, -math.inf, 3.0]]
