"""Moving blocks between pools through a contiguous staging buffer, for swapping out and in.

The staging buffer holds all layers of a block in one piece, so that a block crosses the bus in one
copy of megabytes instead of one of kilobytes for each layer, keys and values apart.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference import block_swap as reference
from octavo.kernels.triton.pools import pool_table

# Words of one program: 16 bytes at a time for each thread of four warps, twice.
RUN = 1024


@triton.jit
def gather_blocks(staging, addresses, strides, blocks, WORDS: tl.constexpr, RUN: tl.constexpr):
    pool, at, mask = place_of(addresses, strides, blocks, WORDS, RUN)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    words = tl.program_id(1) * RUN + tl.arange(0, RUN)
    tl.store(staging + row * WORDS + words, tl.load(pool + at, mask=mask), mask=mask)


@triton.jit
def scatter_blocks(staging, addresses, strides, blocks, WORDS: tl.constexpr, RUN: tl.constexpr):
    pool, at, mask = place_of(addresses, strides, blocks, WORDS, RUN)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    words = tl.program_id(1) * RUN + tl.arange(0, RUN)
    tl.store(pool + at, tl.load(staging + row * WORDS + words, mask=mask), mask=mask)


@triton.jit
def place_of(addresses, strides, blocks, WORDS: tl.constexpr, RUN: tl.constexpr):
    """The pool of this program, and where in it the program's run of words lies."""
    pool = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    block = tl.load(blocks + tl.program_id(2)).to(tl.int64)
    words = tl.program_id(1) * RUN + tl.arange(0, RUN)
    return pool, block * tl.load(strides + tl.program_id(0)) + words, words < WORDS


def block_gather(pools: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """The same as the reference's. Raises ValueError for pools that the kernel does not take."""
    first = pools[0]
    shape = (len(blocks), len(pools), *first.shape[1:])
    staging = torch.empty(shape, dtype=first.dtype, device=first.device)
    _launch(gather_blocks, staging, pools, blocks)
    return staging


def block_scatter(staging: Tensor, pools: Sequence[Tensor], blocks: Tensor) -> None:
    """The same as the reference's. Raises ValueError for pools that the kernel does not take."""
    _launch(scatter_blocks, staging.contiguous(), pools, blocks)


def _launch(kernel: Any, staging: Tensor, pools: Sequence[Tensor], blocks: Tensor) -> None:
    if not len(blocks):
        return
    table = pool_table(pools)
    grid = (len(table), triton.cdiv(table.words, RUN), len(blocks))
    kernel[grid](
        staging.flatten().view(torch.int32),
        table.addresses,
        table.strides,
        blocks.contiguous(),
        WORDS=table.words,
        RUN=RUN,
        num_warps=4,
    )


def block_swap(
    from_pools: Sequence[Tensor], to_pools: Sequence[Tensor], sources: Tensor, destinations: Tensor
) -> None:
    """The same as the reference's; where a pool is the host's, no kernel touches it."""
    if not len(sources):
        return
    from_device, to_device = from_pools[0].device, to_pools[0].device
    gather = block_gather if _has_kernels(from_device) else reference.block_gather
    scatter = block_scatter if _has_kernels(to_device) else reference.block_scatter
    staging = gather(from_pools, sources.to(from_device)).to(to_device)
    scatter(staging, to_pools, destinations.to(to_device))


def _has_kernels(device: torch.device) -> bool:
    return device.type != "cpu" or bool(triton.knobs.runtime.interpret)
