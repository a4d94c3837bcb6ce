"""Copying blocks inside all pools of all layers in one launch."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.block_swap import block_gather, block_scatter
from octavo.kernels.triton.pools import pool_table

# Words that a program holds in registers: 32 for each thread of four warps.
HELD_WORDS = 4096
# Pairs that a launch has room for, so that few variants are compiled. More than the last leave a
# program too short a run of each block to load it well (256 bytes).
ROOM_FOR = (8, 64)


@triton.jit(do_not_specialize=["num_pairs"])
def copy_blocks(
    addresses,
    strides,
    sources,
    destinations,
    num_pairs,
    WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
    RUN: tl.constexpr,
):
    """A program moves the same run of words of every pair in one pool."""
    pool = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    stride = tl.load(strides + tl.program_id(0))
    pairs = tl.arange(0, PAIRS)
    known = pairs < num_pairs
    source = tl.load(sources + pairs, mask=known, other=0).to(tl.int64)
    destination = tl.load(destinations + pairs, mask=known, other=0).to(tl.int64)
    words = tl.program_id(1) * RUN + tl.arange(0, RUN)
    mask = known[:, None] & (words < WORDS)[None, :]
    held = tl.load(pool + (source * stride)[:, None] + words[None, :], mask=mask)
    # A block may be source and destination: all is read before anything is written.
    tl.debug_barrier()
    tl.store(pool + (destination * stride)[:, None] + words[None, :], held, mask=mask)


def block_copy(pools: Sequence[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """The same as the reference's. Raises ValueError for pools that the kernel does not take."""
    num_pairs = len(sources)
    if not num_pairs or not pools:
        return
    if num_pairs > ROOM_FOR[-1]:
        block_scatter(block_gather(pools, sources), pools, destinations)
        return
    table = pool_table(pools)
    pairs = next(room for room in ROOM_FOR if room >= num_pairs)
    run = HELD_WORDS // pairs
    copy_blocks[(len(table), triton.cdiv(table.words, run))](
        table.addresses,
        table.strides,
        sources.contiguous(),
        destinations.contiguous(),
        num_pairs,
        WORDS=table.words,
        PAIRS=pairs,
        RUN=run,
        num_warps=4,
    )
