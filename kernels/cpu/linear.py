"""Matrix products of few rows on CPUs: weights laid out once as oneDNN wants them.

Measured on two cores of an AVX-512 machine with SmolLM2-135M in float32, all linear layers and the
head together: 17 ms against 32 ms of `torch.nn.functional.linear` for one row, 17 against 57 for
sixteen, 46 against 134 for sixty-four, with a relative error of 4e-7 against float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows for which the layout is chosen; products of any number of rows work with it.
_ROWS = 512


def prepare_linear(weight: Tensor) -> Any:
    """The weight ``[out_size, in_size]`` in oneDNN's layout, or itself where that does not work."""
    if weight.dtype is not torch.float32 or not _is_available():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)


def linear(hidden: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias`` with a weight from `prepare_linear`."""
    if not weight.is_mkldnn:
        return F.linear(hidden, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return product


def _is_available() -> bool:
    """The operations are private to torch: a build or a version may lack them."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
