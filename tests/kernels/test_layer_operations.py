import math

import pytest
import torch

from octavo.kernels.reference.rotary import rotary, rotary_table
from octavo.kernels.table import CPU, REFERENCE, Kernels

BOTH = pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=["reference", "cpu"])


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
    found = rotary(heads, rotary_table(size, 64, theta)[positions])
    as_complex = torch.complex(heads[..., : size // 2], heads[..., size // 2 :])
    for token, position in enumerate(positions.tolist()):
        for pair in range(size // 2):
            angle = position * theta ** (-2 * pair / size)
            turned = as_complex[token, :, pair] * complex(math.cos(angle), math.sin(angle))
            wanted = torch.stack((turned.real, turned.imag))
            assert torch.allclose(found[token, :, [pair, pair + size // 2]].T, wanted, atol=1e-5)
