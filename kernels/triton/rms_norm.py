"""Root-mean-square normalisation, alone or of a sum that the residual stream keeps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.helpers import check_inner, padded, warps_for


@triton.jit
def normalize_rows(
    normed,
    total,  # where hidden + residual goes; None without a residual
    hidden,
    residual,  # None: hidden is normalised as it is
    weight,
    hidden_token,  # strides, in entries
    residual_token,
    epsilon,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    mask = columns < SIZE
    row = tl.load(hidden + token * hidden_token + columns, mask=mask, other=0.0)
    if residual is not None:
        row += tl.load(residual + token * residual_token + columns, mask=mask, other=0.0)
        tl.store(total + token * SIZE + columns, row, mask=mask)
    wide = row.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    factors = tl.load(weight + columns, mask=mask, other=0.0)
    # Rounded before the weight, as the reference does.
    tl.store(normed + token * SIZE + columns, scaled.to(row.dtype) * factors, mask=mask)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same as the reference's. Raises ValueError for a layout that the kernel does not take."""
    check_inner(hidden=hidden, weight=weight)
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch(normed, None, hidden, None, weight, epsilon)
    return normed


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The same as the reference's. Raises ValueError for a layout that the kernel does not take."""
    check_inner(hidden=hidden, residual=residual, weight=weight)
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    total = torch.empty_like(normed)
    _launch(normed, total, hidden, residual, weight, epsilon)
    return normed, total


def _launch(
    normed: Tensor,
    total: Tensor | None,
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
) -> None:
    num_tokens, size = hidden.shape
    if not num_tokens:
        return
    normalize_rows[(num_tokens,)](
        normed,
        total,
        hidden,
        residual,
        weight,
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        epsilon,
        SIZE=size,
        SIZE_PADDED=padded(size),
        num_warps=warps_for(size),
    )
