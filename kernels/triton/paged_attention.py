"""Unified paged attention: prefill chunks and decodes of one forward in one launch.

A program serves all query heads of one KV head, so that keys and values load once: the rows of its
tile are pairs of a query and a head of the group. Decodes of long rows go to `split_decode`.

Sources: PagedAttention, Kwon et al., SOSP 2023, section 4.1; FlashAttention-2, Dao, 2023, section 3.1
(online softmax).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales
from octavo.kernels.triton.arch import arch_of
from octavo.kernels.triton.attention_tile import attend_tile, first_seen, head_of
from octavo.kernels.triton.helpers import (
    bytes_if_fp8,
    check_inner,
    check_scales,
    first_item,
    padded_head,
    row_of_item,
)
from octavo.kernels.triton.split_decode import attend_splits
from octavo.kernels.triton.tiles import SPLIT_TOKENS, Tiles, chunk_tiles, decode_tiles


@triton.jit(do_not_specialize=["num_rows"])
def attend_rows(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    query, key_cache, value_cache, query_begins, context_lens, block_indices, block_begins,
    key_scales, value_scales, num_rows, scale,
    query_token, query_head,  # strides, in entries
    key_block, key_head, key_token, value_block, value_head, value_token,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,  # decodes of more positions are left out
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // GROUP
    item, head = tl.program_id(0), tl.program_id(1)
    row = row_of_item(query_begins, num_rows, item, 1, QUERIES)
    first = tl.load(query_begins + row).to(tl.int64)
    count = (tl.load(query_begins + row + 1) - first).to(tl.int32)
    tile = (item - first_item(query_begins, row, 1, QUERIES)) * QUERIES
    context = tl.load(context_lens + row).to(tl.int32)
    if (tile < 0) | (tile >= count) | ((count == 1) & (context + 1 > SPLIT)):
        return

    lanes, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    queries = tile + lanes // GROUP
    heads = head * GROUP + lanes % GROUP
    used = (lanes < QUERIES * GROUP) & (queries < count)
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    at = (first + queries) * query_token + heads * query_head
    loaded = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)

    begin = first_seen(context + tile, KEYS, WINDOW)
    end = context + tl.minimum(tile + QUERIES, count)
    table = block_indices + tl.load(block_begins + row)
    keys = head_of(key_cache, key_scales, head, key_block, key_head, key_token)
    values = head_of(value_cache, value_scales, head, value_block, value_head, value_token)
    attended, _ = attend_tile(
        loaded, context + queries, begin, end, table, keys, values, scale,
        HEAD_DIM, BLOCK_SIZE, KEYS, WINDOW, SOFT_CAP,
    )  # fmt: skip
    out_at = ((first + queries) * tl.num_programs(1) * GROUP + heads) * HEAD_DIM
    tl.store(output + out_at[:, None] + dims[None, :], attended.to(output.dtype.element_ty), mask=mask)


def prepare_attention(rows: AttentionRows, key_cache: Tensor) -> AttentionRows:
    """What `paged_attention` wants to know of the rows before the first layer: nothing more."""
    return rows


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: AttentionRows,
    scale: float,
    form: AttentionForm = PLAIN,
    scales: KvScales | None = None,
    *,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """The same as the reference's.

    Args:
        split_tokens: decodes of more positions are cut into parts of so many.

    Raises:
        ValueError: a layout or a type that the kernel does not take.
    """
    _check(query, key_cache, value_cache, scales)
    # Queries outside all rows (padding under a CUDA graph) get zeros.
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    num_rows = len(rows.context_lens)
    if not num_rows or not len(query):
        return output
    shared = _arguments(query, key_cache, value_cache, rows, scale, form, scales)
    _, num_kv_heads, block_size, _ = key_cache.shape
    # Known without a look at the rows, which are on the device: no row is longer than all blocks.
    splits = len(rows.block_indices) * block_size > split_tokens
    tiles = _tiles(query, key_cache, has_chunks=len(query) > num_rows)
    items = len(query) // tiles.queries(shared["GROUP"]) + num_rows
    attend_rows[(items, num_kv_heads)](
        output,
        **shared,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        SPLIT=split_tokens,
        **tiles.options(),
    )
    if splits:
        decode = _tiles(query, key_cache, has_chunks=False)
        attend_splits(output, shared, len(rows.block_indices), num_kv_heads, split_tokens, decode)
    return output


def _arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: AttentionRows,
    scale: float,
    form: AttentionForm,
    scales: KvScales | None,
) -> dict[str, Any]:
    """What both kernels take."""
    head_dim = query.shape[2]
    return {
        "query": query,
        "key_cache": bytes_if_fp8(key_cache),
        "value_cache": bytes_if_fp8(value_cache),
        **vars(rows),
        "key_scales": None if scales is None else scales.keys,
        "value_scales": None if scales is None else scales.values,
        "num_rows": len(rows.context_lens),
        "scale": scale,
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "key_block": key_cache.stride(0),
        "key_head": key_cache.stride(1),
        "key_token": key_cache.stride(2),
        "value_block": value_cache.stride(0),
        "value_head": value_cache.stride(1),
        "value_token": value_cache.stride(2),
        "GROUP": query.shape[1] // key_cache.shape[1],
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": padded_head(head_dim),
        "BLOCK_SIZE": key_cache.shape[2],
        "WINDOW": form.window,
        "SOFT_CAP": form.soft_cap,
    }


def _tiles(query: Tensor, key_cache: Tensor, has_chunks: bool) -> Tiles:
    _, num_heads, head_dim = query.shape
    choose = chunk_tiles if has_chunks else decode_tiles
    group = num_heads // key_cache.shape[1]
    # What is multiplied counts, too: entries of fp8 become the query's.
    itemsize = 4 if query.dtype is torch.float32 else key_cache.element_size()
    return choose(arch_of(query.device), group, head_dim, itemsize)


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, scales: KvScales | None) -> None:
    check_inner(query=query, key_cache=key_cache, value_cache=value_cache)
    if query.shape[1] % key_cache.shape[1] or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit caches {tuple(key_cache.shape)}")
    fp8 = key_cache.dtype is torch.float8_e4m3fn
    if key_cache.dtype is not value_cache.dtype or (not fp8 and key_cache.dtype is not query.dtype):
        raise ValueError(
            f"caches of {key_cache.dtype} and {value_cache.dtype} for {query.dtype} queries"
        )
    check_scales(key_cache, scales)
