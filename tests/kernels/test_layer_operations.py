import math

import pytest
import torch
from kernel_inputs import relative_error

from octavo.kernels.reference.rotary import inverse_frequencies, rotary, rotary_table
from octavo.kernels.table import CPU, REFERENCE, Kernels, kernels_named

NATIVE = kernels_named("native", "cpu")
TRITON = kernels_named("triton", "cpu")
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, CPU, NATIVE], ids=["reference", "cpu", "native"])


@BOTH
def test_rms_norm(kernels: Kernels) -> None:
    hidden, weight = torch.randn(3, 8, dtype=torch.float64) * 5, torch.randn(8, dtype=torch.float64)
    found = kernels.rms_norm(hidden, weight, 1e-3)
    for row in range(3):
        size = math.sqrt(sum(x * x for x in hidden[row].tolist()) / 8 + 1e-3)
        wanted = [x / size * w for x, w in zip(hidden[row].tolist(), weight.tolist(), strict=True)]
        assert found[row].tolist() == pytest.approx(wanted, rel=1e-12)


@BOTH
def test_rms_norm_of_large_half_precision_does_not_overflow(kernels: Kernels) -> None:
    hidden = torch.full((1, 64), 2000.0, dtype=torch.float16)
    found = kernels.rms_norm(hidden, torch.ones(64, dtype=torch.float16), 1e-5)
    assert found.tolist()[0] == pytest.approx([1.0] * 64, rel=1e-3)


@BOTH
def test_silu_mul(kernels: Kernels) -> None:
    gate, up = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    found = kernels.silu_mul(torch.cat((gate, up), dim=1))
    for row in range(2):
        pairs = zip(gate[row].tolist(), up[row].tolist(), strict=True)
        wanted = [g / (1 + math.exp(-g)) * u for g, u in pairs]
        assert found[row].tolist() == pytest.approx(wanted, rel=1e-12)


def test_rotary_is_a_rotation_of_complex_numbers() -> None:
    positions, theta, size = torch.tensor([0, 1, 37]), 10_000.0, 8
    heads = torch.randn(3, 2, size, dtype=torch.float64)
    found = rotary(heads, rotary_table(inverse_frequencies(size, theta), 64)[positions])
    as_complex = torch.complex(heads[..., : size // 2], heads[..., size // 2 :])
    for token, position in enumerate(positions.tolist()):
        for pair in range(size // 2):
            angle = position * theta ** (-2 * pair / size)
            turned = as_complex[token, :, pair] * complex(math.cos(angle), math.sin(angle))
            wanted = torch.stack((turned.real, turned.imag))
            assert torch.allclose(found[token, :, [pair, pair + size // 2]].T, wanted, atol=1e-5)


# -- Triton, in the interpreter ---------------------------------------------------------------------

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}
TYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def strided(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that lie further apart than they are long."""
    wide = torch.randn(rows, columns + 16, generator=torch.Generator().manual_seed(columns))
    return wide.to(dtype)[:, :columns]


@TYPES
@pytest.mark.parametrize("size", [8, 576, 1000])
def test_triton_rms_norm_with_and_without_residual(size: int, dtype: torch.dtype) -> None:
    hidden, residual = strided(3, size, dtype), strided(3, size, dtype) * 3
    weight = torch.rand(size).to(dtype)
    before = hidden.clone(), residual.clone()
    found = TRITON.rms_norm(hidden, weight, 1e-5)
    wanted = REFERENCE.rms_norm(hidden.double(), weight.double(), 1e-5)
    assert relative_error(found, wanted) < LIMITS[dtype]
    normed, total = TRITON.add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(total, hidden + residual)
    wanted = REFERENCE.rms_norm(total.double(), weight.double(), 1e-5)
    assert relative_error(normed, wanted) < LIMITS[dtype]
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])


@BOTH
def test_adding_before_the_norm(kernels: Kernels) -> None:
    hidden, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed, total = kernels.add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(total, hidden + residual)
    assert torch.equal(normed, kernels.rms_norm(hidden + residual, weight, 1e-5))


@TYPES
@pytest.mark.parametrize("size", [5, 48, 1536])
def test_triton_silu_mul(size: int, dtype: torch.dtype) -> None:
    both = strided(3, 2 * size, dtype) * 4
    wanted = REFERENCE.silu_mul(both.double())
    assert relative_error(TRITON.silu_mul(both), wanted) < LIMITS[dtype]


@TYPES
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (5, 80), (3, 96)])
def test_triton_rotary(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    packed = strided(4, (heads + 2) * head_dim, dtype).view(4, heads + 2, head_dim)
    rotations = rotary_table(inverse_frequencies(head_dim, 10_000.0), 64)[
        torch.tensor([0, 1, 37, 63])
    ].to(dtype)
    found = TRITON.rotary(packed[:, :heads], rotations)
    wanted = REFERENCE.rotary(packed[:, :heads].double(), rotations.double())
    assert relative_error(found, wanted) < LIMITS[dtype]


def test_triton_takes_no_tokens() -> None:
    empty = torch.zeros(0, 8)
    assert TRITON.rms_norm(empty, torch.ones(8), 1e-5).shape == (0, 8)
    assert TRITON.silu_mul(empty).shape == (0, 4)
    assert TRITON.rotary(torch.zeros(0, 2, 8), empty).shape == (0, 2, 8)
