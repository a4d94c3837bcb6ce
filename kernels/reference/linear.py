"""Matrix products with the weights of a layer."""

from torch import Tensor
from torch.nn import functional as F


def prepare_linear(weight: Tensor) -> Tensor:
    """The weight ``[out_size, in_size]`` as `linear` takes it."""
    return weight


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias``: ``[n, out_size]`` from ``[n, in_size]``."""
    return F.linear(hidden, weight, bias)
