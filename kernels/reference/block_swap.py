"""Moving whole blocks from one pool to another, for swapping out and in."""

from collections.abc import Sequence

from torch import Tensor


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
