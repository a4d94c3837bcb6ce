"""Writing keys and values of new tokens into the paged cache, alone or with the rotary embedding."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.rows import KvScales
from octavo.kernels.triton.helpers import (
    bytes_if_fp8,
    check_inner,
    check_scales,
    padded,
    store_cached,
    warps_for,
)


@triton.jit
def write_heads(
    new, cache, scales, new_head, cache_head,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """Copies all heads of one token, which begin at `new`, to its place, which begins at `cache`."""
    heads, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, HEAD_PADDED)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    loaded = tl.load(new + heads[:, None] * new_head + dims[None, :], mask=mask)
    if scales is not None:
        loaded = loaded.to(tl.float32)
        loaded /= tl.load(scales + heads, mask=heads < NUM_HEADS, other=1.0)[:, None]
    at = heads.to(tl.int64) * cache_head
    store_cached(cache + at[:, None] + dims[None, :], loaded, mask)


@triton.jit
def write_tokens(
    keys, values, key_cache, value_cache, kv_slots, key_scales, value_scales,
    new_key_token, new_key_head, new_value_token, new_value_head,  # strides, in entries
    key_block, key_head, key_token, value_block, value_head, value_token,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots + token).to(tl.int64)
    if slot < 0:
        return
    block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    new = keys + token * new_key_token
    place = key_cache + block * key_block + inside * key_token
    write_heads(
        new, place, key_scales, new_key_head, key_head,
        NUM_HEADS, HEADS_PADDED, HEAD_DIM, HEAD_PADDED,
    )  # fmt: skip
    new = values + token * new_value_token
    place = value_cache + block * value_block + inside * value_token
    write_heads(
        new, place, value_scales, new_value_head, value_head,
        NUM_HEADS, HEADS_PADDED, HEAD_DIM, HEAD_PADDED,
    )  # fmt: skip


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
    """The same as the reference's. Raises ValueError for a layout that the kernel does not take."""
    check_inner(keys=keys, values=values, key_cache=key_cache, value_cache=value_cache)
    check_scales(key_cache, scales)
    num_tokens, num_heads, head_dim = keys.shape
    if not num_tokens:
        return
    write_tokens[(num_tokens,)](
        keys,
        values,
        bytes_if_fp8(key_cache),
        bytes_if_fp8(value_cache),
        kv_slots,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        *keys.stride()[:2],
        *values.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEADS_PADDED=padded(num_heads),
        HEAD_DIM=head_dim,
        HEAD_PADDED=padded(head_dim),
        BLOCK_SIZE=key_cache.shape[2],
        num_warps=warps_for(num_heads * head_dim),
    )
