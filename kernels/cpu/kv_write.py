"""Writing to the paged cache on CPUs: the places are worked out once for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import quantized
from octavo.kernels.reference.rotary import rotary
from octavo.kernels.rows import KvScales


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
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: PreparedSlots,
    scales: KvScales | None = None,
) -> None:
    """The same as the reference's, for slots that `prepare_kv_write` has worked out."""
    if scales is not None:
        keys = quantized(keys, scales.keys, key_cache.dtype)
        values = quantized(values, scales.values, value_cache.dtype)
    for new, cache in ((keys, key_cache), (values, value_cache)):
        head_dim = cache.shape[3]
        kept = new if kv_slots.tokens is None else new[kv_slots.tokens]
        cache.view(-1, head_dim)[kv_slots.places] = kept.reshape(-1, head_dim).to(cache.dtype)


def rotary_kv_write(
    heads: Tensor,
    rotations: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: PreparedSlots,
    scales: KvScales | None = None,
) -> Tensor:
    """The same as the reference's, for slots that `prepare_kv_write` has worked out."""
    num_kv_heads = key_cache.shape[1]
    rotated = rotary(heads[:, :-num_kv_heads], rotations)
    values = heads[:, -num_kv_heads:]
    kv_write(rotated[:, -num_kv_heads:], values, key_cache, value_cache, kv_slots, scales)
    return rotated[:, :-num_kv_heads]
