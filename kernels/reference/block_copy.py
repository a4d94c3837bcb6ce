"""Copying whole blocks inside a pool, for copy-on-write."""

from collections.abc import Sequence

from torch import Tensor


def block_copy(pools: Sequence[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """Copies blocks in every pool; all sources are read before any destination is written.

    Args:
        pools: each ``[num_blocks, ...]``: keys and values of all layers.
        sources, destinations: ``[num_pairs]`` block ids; no destination occurs twice.
    """
    for pool in pools:
        pool[destinations.long()] = pool[sources.long()]
