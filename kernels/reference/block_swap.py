"""Moving whole blocks from one pool to another, for swapping out and in."""

from collections.abc import Sequence

import torch
from torch import Tensor


def block_gather(pools: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """Copies blocks of all pools next to one another.

    Args:
        pools: alike, each ``[num_blocks, ...]``: keys and values of all layers.
        blocks: ``[n]`` block ids.

    Returns:
        ``[n, num_pools, ...]``, contiguous.
    """
    return torch.stack([pool[blocks.long()] for pool in pools], dim=1)


def block_scatter(staging: Tensor, pools: Sequence[Tensor], blocks: Tensor) -> None:
    """Copies what `block_gather` made into blocks of all pools; no block occurs twice."""
    for index, pool in enumerate(pools):
        pool[blocks.long()] = staging[:, index]


def block_swap(
    from_pools: Sequence[Tensor], to_pools: Sequence[Tensor], sources: Tensor, destinations: Tensor
) -> None:
    """Gathers `sources` of each pool and scatters them to `destinations` of its partner.

    Args:
        from_pools, to_pools: partners, each ``[num_blocks, ...]``, on the same or another device.
        sources, destinations: ``[num_pairs]`` block ids of the two; no destination occurs twice.
    """
    for from_pool, to_pool in zip(from_pools, to_pools, strict=True):
        gathered = from_pool[sources.to(from_pool.device).long()]
        to_pool[destinations.to(to_pool.device).long()] = gathered.to(to_pool.device)
