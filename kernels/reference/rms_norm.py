"""Root-mean-square normalisation (Zhang and Sennrich, NeurIPS 2019, equation 4)."""

import torch
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scales each vector to a root mean square of 1, then by `weight`.

    The mean is taken in float32 at least, whatever the dtype of `hidden`.

    Args:
        hidden: ``[num_tokens, hidden_size]``.
        weight: ``[hidden_size]``.
    """
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return weight * normed.to(hidden.dtype)


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Adds, then normalises: the normalised sum and the sum, both ``[num_tokens, hidden_size]``."""
    total = hidden + residual
    return rms_norm(total, weight, epsilon), total
