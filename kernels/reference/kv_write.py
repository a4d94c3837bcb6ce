"""Writing the keys and values of new tokens into the paged cache."""

import torch
from torch import Tensor

from octavo.kernels.rows import KvScales


def prepare_kv_write(kv_slots: Tensor, key_cache: Tensor) -> Tensor:
    """What `kv_write` wants to know of the KV slots before the first layer: nothing more."""
    return kv_slots


def kv_write(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: Tensor,
    scales: KvScales | None = None,
) -> None:
    """Stores each token's key and value at its KV slot, in place.

    Args:
        keys, values: ``[num_tokens, num_kv_heads, head_dim]``.
        key_cache, value_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        kv_slots: ``[num_tokens]``, block id * block_size + offset in the block; a negative one is
            padding, whose token is not stored. No slot occurs twice.
        scales: what entries are divided by before they become fp8.
    """
    if scales is not None:
        keys = quantized(keys, scales.keys, key_cache.dtype)
        values = quantized(values, scales.values, value_cache.dtype)
    block_size = key_cache.shape[2]
    real = kv_slots >= 0
    slots = kv_slots[real].long()
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = keys[real].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = values[real].to(value_cache.dtype)


def quantized(heads: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """``[num_tokens, num_kv_heads, head_dim]`` over each head's factor, saturated, in `dtype`."""
    largest = torch.finfo(dtype).max
    divided = heads.to(torch.promote_types(heads.dtype, torch.float32)) / factors[:, None]
    return divided.clamp(-largest, largest).to(dtype)
