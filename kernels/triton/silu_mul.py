"""The gated activation of SwiGLU in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.helpers import check_inner, padded, warps_for

# Entries of one program: long rows are cut so that a few tokens still fill the card.
WIDTH = 1024


@triton.jit
def gate_rows(product, gate_up, gate_up_token, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < SIZE
    row = gate_up + token * gate_up_token
    gate = tl.load(row + columns, mask=mask, other=0.0)
    up = tl.load(row + SIZE + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    active = wide / (1.0 + tl.exp(-wide))
    # Rounded before the product, as the reference does.
    tl.store(product + token * SIZE + columns, active.to(gate.dtype) * up, mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The same as the reference's. Raises ValueError for a layout that the kernel does not take."""
    check_inner(gate_up=gate_up)
    num_tokens, both = gate_up.shape
    size = both // 2
    product = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    width = min(WIDTH, padded(size))
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, width))
        gate_rows[grid](
            product, gate_up, gate_up.stride(0), SIZE=size, WIDTH=width, num_warps=warps_for(width)
        )
    return product
