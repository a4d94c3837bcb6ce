"""Matrix products: the CPU implementation against float64, for every number of rows alike."""

import pytest
import torch

from octavo.kernels.cpu import linear as cpu
from octavo.kernels.reference import linear as reference


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 513])
@pytest.mark.parametrize(("in_size", "out_size"), [(576, 960), (33, 17)])
def test_linear(rows: int, in_size: int, out_size: int, bias: bool) -> None:
    chance = torch.Generator().manual_seed(rows)
    weight = torch.randn(out_size, in_size, generator=chance)
    added = torch.randn(out_size, generator=chance) if bias else None
    hidden = torch.randn(rows, in_size, generator=chance)
    wanted = hidden.double() @ weight.double().T + (added.double() if added is not None else 0)
    for implementation in (cpu, reference):
        prepared = implementation.prepare_linear(weight)
        with torch.inference_mode():
            product = implementation.linear(hidden, prepared, added)
        assert product.shape == (rows, out_size)
        assert (product.double() - wanted).norm() <= 1e-6 * max(float(wanted.norm()), 1.0)


def test_other_types_keep_their_layout() -> None:
    weight = torch.randn(8, 8, dtype=torch.bfloat16)
    assert cpu.prepare_linear(weight) is weight
    assert torch.equal(cpu.linear(weight, weight, None), reference.linear(weight, weight, None))
