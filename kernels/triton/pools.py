"""Many pools as one argument of a kernel: a table of addresses, and blocks as runs of words."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 4  # bytes that kernels move at a time


@dataclass(frozen=True)
class PoolTable:
    """Pools that are alike but for their address and the distance of their blocks."""

    addresses: Tensor  # [num_pools] int64, of the first block
    strides: Tensor  # [num_pools] int64, words between blocks
    words: int  # in a block
    device: torch.device

    def __len__(self) -> int:
        return len(self.addresses)


def pool_table(pools: Sequence[Tensor]) -> PoolTable:
    """Raises ValueError for pools whose blocks differ or do not lie in one piece."""
    first = pools[0]
    size = first[0].numel() * first.element_size()
    for pool in pools:
        stride = pool.stride(0) * pool.element_size()
        if pool.shape[1:] != first.shape[1:] or pool.dtype is not first.dtype:
            raise ValueError(f"pools of {tuple(pool.shape)} and {tuple(first.shape)} differ")
        if not pool[0].is_contiguous() or size % WORD or stride % WORD or pool.data_ptr() % WORD:
            raise ValueError(f"a block must lie in one piece of whole words of {WORD} bytes")
    device = first.device
    return PoolTable(
        addresses=torch.tensor([pool.data_ptr() for pool in pools], device=device),
        strides=torch.tensor([p.stride(0) * p.element_size() // WORD for p in pools], device=device),
        words=size // WORD,
        device=device,
    )
