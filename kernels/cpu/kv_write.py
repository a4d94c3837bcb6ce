"""Writing to the paged cache on CPUs: the places are worked out once for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PreparedSlots:
    """Where the heads of the tokens go."""

    tokens: Tensor | None  # those that are not padding; None: all of them
    places: Tensor  # [num_tokens * num_kv_heads], rows of a cache seen as [-1, head_dim]


def prepare_kv_write(kv_slots: Tensor, key_cache: Tensor) -> PreparedSlots:
    """Turns KV slots into rows of caches of the shape of `key_cache`."""
    _, num_kv_heads, block_size, _ = key_cache.shape
    tokens = None
    if bool((kv_slots < 0).any()):
        tokens = torch.nonzero(kv_slots >= 0).flatten()
        kv_slots = kv_slots[tokens]
    slots = kv_slots.long()
    blocks, offsets = slots // block_size, slots % block_size
    heads = blocks[:, None] * num_kv_heads + torch.arange(num_kv_heads)
    return PreparedSlots(tokens, (heads * block_size + offsets[:, None]).reshape(-1))


def kv_write(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: PreparedSlots
) -> None:
    """The same as the reference's, for slots that `prepare_kv_write` has worked out."""
    for new, cache in ((keys, key_cache), (values, value_cache)):
        head_dim = cache.shape[3]
        kept = new if slots.tokens is None else new[slots.tokens]
        cache.view(-1, head_dim)[slots.places] = kept.reshape(-1, head_dim).to(cache.dtype)
