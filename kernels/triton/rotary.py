"""Rotary position embedding, alone or with the write of what it rotates to the paged cache."""

import torch
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
from octavo.kernels.triton.kv_write import write_heads


@triton.jit
def rotated_halves(
    heads, rotations, head_stride,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Both halves of all heads of a token, ``[HEADS_PADDED, HALF_PADDED]``, and what of it is real.

    `heads` points to the token's first head, `rotations` to its cosines, which its sines follow.
    """
    index, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, HALF_PADDED)
    mask = (index < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    at = index[:, None] * head_stride + dims[None, :]
    first = tl.load(heads + at, mask=mask, other=0.0)
    second = tl.load(heads + at + HALF, mask=mask, other=0.0)
    cosines = tl.load(rotations + dims, mask=dims < HALF, other=0.0).to(first.dtype)[None, :]
    sines = tl.load(rotations + HALF + dims, mask=dims < HALF, other=0.0).to(first.dtype)[None, :]
    return first * cosines - second * sines, second * cosines + first * sines, mask


@triton.jit
def rotate_heads(
    output,  # [num_tokens, NUM_HEADS, 2 * HALF], contiguous
    heads,
    rotations,  # [num_tokens, 2 * HALF], contiguous
    heads_token, heads_head,  # strides, in entries
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    own, turns = heads + token * heads_token, rotations + token * 2 * HALF
    first, second, mask = rotated_halves(
        own, turns, heads_head, NUM_HEADS, HEADS_PADDED, HALF, HALF_PADDED
    )
    index = token * NUM_HEADS + tl.arange(0, HEADS_PADDED)
    at = index[:, None] * (2 * HALF) + tl.arange(0, HALF_PADDED)[None, :]
    tl.store(output + at, first, mask=mask)
    tl.store(output + at + HALF, second, mask=mask)


@triton.jit
def write_rotated(
    heads, rotations, place, scales, heads_head, cache_head,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Rotates the keys of one token and writes them to its place in the cache."""
    first, second, mask = rotated_halves(
        heads, rotations, heads_head, NUM_HEADS, HEADS_PADDED, HALF, HALF_PADDED
    )
    index = tl.arange(0, HEADS_PADDED)
    if scales is not None:
        factors = tl.load(scales + index, mask=index < NUM_HEADS, other=1.0)[:, None]
        first, second = first.to(tl.float32) / factors, second.to(tl.float32) / factors
    at = index.to(tl.int64)[:, None] * cache_head + tl.arange(0, HALF_PADDED)[None, :]
    store_cached(place + at, first, mask)
    store_cached(place + at + HALF, second, mask)


@triton.jit
def rotate_and_write(
    query,  # [num_tokens, NUM_HEADS, 2 * HALF], contiguous
    heads,  # queries, keys and values of each token
    rotations,  # [num_tokens, 2 * HALF], contiguous
    key_cache, value_cache, kv_slots, key_scales, value_scales,
    heads_token, heads_head,  # strides, in entries
    key_block, key_head, key_token, value_block, value_head, value_token,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rotate_heads(
        query, heads, rotations, heads_token, heads_head, NUM_HEADS, HEADS_PADDED, HALF, HALF_PADDED
    )
    slot = tl.load(kv_slots + token).to(tl.int64)
    if slot < 0:
        return
    block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    keys = heads + token * heads_token + NUM_HEADS * heads_head
    place = key_cache + block * key_block + inside * key_token
    write_rotated(
        keys, rotations + token * 2 * HALF, place, key_scales, heads_head, key_head,
        NUM_KV_HEADS, KV_HEADS_PADDED, HALF, HALF_PADDED,
    )  # fmt: skip
    values = keys + NUM_KV_HEADS * heads_head
    place = value_cache + block * value_block + inside * value_token
    write_heads(
        values, place, value_scales, heads_head, value_head,
        NUM_KV_HEADS, KV_HEADS_PADDED, 2 * HALF, 2 * HALF_PADDED,
    )  # fmt: skip


def rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """The same as the reference's. Raises ValueError for a layout that the kernel does not take."""
    check_inner(heads=heads)
    num_tokens, num_heads, head_dim = heads.shape
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if num_tokens:
        rotate_heads[(num_tokens,)](
            output,
            heads,
            rotations.contiguous(),
            *heads.stride()[:2],
            NUM_HEADS=num_heads,
            HEADS_PADDED=padded(num_heads),
            HALF=head_dim // 2,
            HALF_PADDED=padded(head_dim // 2),
            num_warps=warps_for(num_heads * head_dim // 2),
        )
    return output


def rotary_kv_write(
    heads: Tensor,
    rotations: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: Tensor,
    scales: KvScales | None = None,
) -> Tensor:
    """The same as the reference's. Raises ValueError for a layout that the kernel does not take."""
    check_inner(heads=heads, key_cache=key_cache, value_cache=value_cache)
    check_scales(key_cache, scales)
    num_tokens, all_heads, head_dim = heads.shape
    num_kv_heads = key_cache.shape[1]
    num_heads = all_heads - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    if num_tokens:
        rotate_and_write[(num_tokens,)](
            query,
            heads,
            rotations.contiguous(),
            bytes_if_fp8(key_cache),
            bytes_if_fp8(value_cache),
            kv_slots,
            None if scales is None else scales.keys,
            None if scales is None else scales.values,
            *heads.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            NUM_HEADS=num_heads,
            HEADS_PADDED=padded(num_heads),
            NUM_KV_HEADS=num_kv_heads,
            KV_HEADS_PADDED=padded(num_kv_heads),
            HALF=head_dim // 2,
            HALF_PADDED=padded(head_dim // 2),
            BLOCK_SIZE=key_cache.shape[2],
            num_warps=warps_for(num_heads * head_dim // 2),
        )
    return query
