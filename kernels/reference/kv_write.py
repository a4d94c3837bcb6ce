"""Writing the keys and values of new tokens into the paged cache."""

from torch import Tensor


def prepare_kv_write(kv_slots: Tensor, key_cache: Tensor) -> Tensor:
    """What `kv_write` wants to know of the KV slots before the first layer: nothing more."""
    return kv_slots


def kv_write(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, kv_slots: Tensor
) -> None:
    """Stores each token's key and value at its KV slot, in place.

    Args:
        keys, values: ``[num_tokens, num_kv_heads, head_dim]``.
        key_cache, value_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        kv_slots: ``[num_tokens]``, block id * block_size + offset in the block; a negative one is
            padding, whose token is not stored. No slot occurs twice.
    """
    block_size = key_cache.shape[2]
    real = kv_slots >= 0
    slots = kv_slots[real].long()
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = keys[real].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = values[real].to(value_cache.dtype)
