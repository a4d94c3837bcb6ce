"""Sampling in Triton's interpreter: the reference's numbers, and its tokens wherever they are clear."""

import pytest
import torch
import triton
import triton.language as tl
from test_sampling import LIMITS, logits, params

from octavo.kernels.reference import sampling as reference
from octavo.kernels.reference.philox import gumbel_noise
from octavo.kernels.table import kernels_named
from octavo.kernels.triton.philox import gumbel_of_ids

TRITON = kernels_named("triton", "cpu")


@pytest.mark.parametrize("limits", LIMITS)
def test_draws_what_the_reference_draws(limits: tuple[float, int, float, float]) -> None:
    rows = logits(8)
    given = params(8, **dict(zip(("temperature", "top_k", "top_p", "min_p"), limits, strict=True)))
    assert TRITON.sample(rows, given).tolist() == reference.sample(rows, given).tolist()


def test_limits_settle_ties_by_id() -> None:
    """Many equal logits at the edge of what a limit keeps: only the lowest ids of them belong."""
    rows = torch.randint(-4, 3, (12, 300), generator=torch.Generator().manual_seed(1)).float()
    for limit in ({"top_k": 50}, {"top_p": 0.5}, {"top_k": 120, "top_p": 0.7}, {"min_p": 0.3}):
        given = params(12, temperature=1.5, **limit)
        assert TRITON.sample(rows, given).tolist() == reference.sample(rows, given).tolist()


def test_rows_of_any_kind_beside_one_another() -> None:
    rows = logits(9)
    rows[2, 100:] = float("-inf")
    rows[6] = float("-inf")
    rows[8] = 0.0
    given = params(
        9,
        temperature=[0.0, 1.0, 0.5, 1e-38, 1.0, 2.0, 1.0, 0.0, 0.0],
        top_k=[0, 0, 5, 0, 3, 0, 0, 0, 0],
        top_p=[1.0, 0.5, 1.0, 1e-6, 0.9, 1.0, 1.0, 0.2, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        seeds=[1, 2**63 - 1, -1, 4, 5, 6, 7, 8, 9],
    )
    found = TRITON.sample(rows, given).tolist()
    assert found == reference.sample(rows, given).tolist()
    alone = [int(TRITON.sample(rows[i : i + 1], given.rows(torch.tensor([i])))) for i in range(9)]
    assert found == alone


def test_masked_tokens_are_never_drawn() -> None:
    rows = torch.zeros(20, 50)
    rows[:, 3:] = float("-inf")
    assert set(TRITON.sample(rows, params(20)).tolist()) == {0, 1, 2}


def test_log_normalizers() -> None:
    rows = logits(4, spread=20.0, vocab=3000)
    rows[1, 5:] = float("-inf")
    rows[2] = float("-inf")
    found = TRITON.log_normalizer(rows)
    assert torch.allclose(found, torch.logsumexp(rows.double(), 1).float(), rtol=1e-6)
    best = TRITON.top_ids(rows[:1], 5)
    assert best.tolist() == reference.top_ids(rows[:1], 5).tolist()


def test_other_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        TRITON.sample(logits(2).half(), params(2))
    with pytest.raises(ValueError, match="contiguous"):
        TRITON.log_normalizer(logits(2).T)


@triton.jit
def noise_of(out, seed, position, sample, first, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    noise = gumbel_of_ids(tl.load(seed), tl.load(position), tl.load(sample), first, COUNT)
    tl.store(out + tl.arange(0, COUNT), noise)


@pytest.mark.parametrize("drawn", [(5, 0, 0, 0), (-(2**40) - 3, 70_000, 9, 128_000)])
def test_noise_is_the_same_bits(drawn: tuple[int, int, int, int]) -> None:
    """Up to the last bit of two logarithms, with seeds of all 64 bits."""
    seed, position, sample = (torch.tensor([value]) for value in drawn[:3])
    found = torch.zeros(64)
    noise_of[(1,)](found, seed, position, sample, drawn[3], COUNT=64)
    wanted = gumbel_noise(seed, position, sample, torch.arange(drawn[3], drawn[3] + 64)[None])
    assert torch.allclose(found, wanted[0], rtol=1e-5, atol=1e-6)
