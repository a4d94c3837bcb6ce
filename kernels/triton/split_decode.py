"""Decodes of long rows: several programs share a row's positions, a second kernel joins what they find.

Each split leaves its result normalised, with the logarithm (base 2) of its softmax's sum; a split that
sees nothing leaves -inf. Where splits begin is a function of the position alone.

Source: Flash-Decoding, Dao et al., 2023.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention_tile import attend_tile, first_seen, head_of
from octavo.kernels.triton.helpers import finite_or_zero, first_item, row_of_item
from octavo.kernels.triton.tiles import Tiles

# Splits that are joined at once.
JOINED = 16


@triton.jit
def decode_length(query_begins, context_lens, row, SPLIT: tl.constexpr):
    """Positions that the row's query sees if it is a decode of more than SPLIT, else 0."""
    count = tl.load(query_begins + row + 1) - tl.load(query_begins + row)
    length = (tl.load(context_lens + row) + 1).to(tl.int32)
    return tl.where((count == 1) & (length > SPLIT), length, 0)


@triton.jit(do_not_specialize=["num_rows"])
def attend_split(
    partial,  # [num_items, num_heads, head_dim], float32
    sums_log2,  # [num_items, num_heads], float32
    query, key_cache, value_cache, query_begins, context_lens, block_indices, block_begins,
    key_scales, value_scales, num_rows, scale,
    query_token, query_head,  # strides, in entries
    key_block, key_head, key_token, value_block, value_head, value_token,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    row = row_of_item(block_begins, num_rows, item, BLOCK_SIZE, SPLIT)
    length = decode_length(query_begins, context_lens, row, SPLIT)
    begin = (item - first_item(block_begins, row, BLOCK_SIZE, SPLIT)) * SPLIT
    if (begin < 0) | (begin >= length):
        return

    lanes, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    heads = head * GROUP + lanes
    used = lanes < GROUP
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    at = tl.load(query_begins + row).to(tl.int64) * query_token + heads * query_head
    loaded = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)

    end = tl.minimum(begin + SPLIT, length)
    begin = tl.maximum(begin, first_seen(length - 1, KEYS, WINDOW))
    table = block_indices + tl.load(block_begins + row)
    keys = head_of(key_cache, key_scales, head, key_block, key_head, key_token)
    values = head_of(value_cache, value_scales, head, value_block, value_head, value_token)
    attended, logs = attend_tile(
        loaded, tl.zeros([ROWS], tl.int32) + (length - 1), begin, end, table, keys, values, scale,
        HEAD_DIM, BLOCK_SIZE, KEYS, WINDOW, SOFT_CAP,
    )  # fmt: skip
    slots = item.to(tl.int64) * tl.num_programs(1) * GROUP + heads
    tl.store(partial + slots[:, None] * HEAD_DIM + dims[None, :], attended, mask=mask)
    tl.store(sums_log2 + slots, logs, mask=used)


@triton.jit
def join_splits(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial, sums_log2, query_begins, context_lens, block_begins,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    length = decode_length(query_begins, context_lens, row, SPLIT)
    if length == 0:
        return
    first = first_item(block_begins, row, BLOCK_SIZE, SPLIT)
    count = tl.cdiv(length, SPLIT)
    dims = tl.arange(0, HEAD_PADDED)
    real = dims < HEAD_DIM
    maximum = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    sums = tl.zeros([HEAD_PADDED], tl.float32)
    for begin in range(0, count, JOINED):
        splits = begin + tl.arange(0, JOINED)
        known = splits < count
        slots = (first + splits).to(tl.int64) * num_heads + head
        logs = tl.load(sums_log2 + slots, mask=known, other=float("-inf"))
        parts = tl.load(
            partial + slots[:, None] * HEAD_DIM + dims[None, :],
            mask=known[:, None] & real[None, :],
            other=0.0,
        )
        raised = tl.maximum(maximum, tl.max(logs, 0))
        base = finite_or_zero(raised)
        shares = tl.exp2(logs - base)
        shrink = tl.exp2(maximum - base)
        weight = weight * shrink + tl.sum(shares, 0)
        sums = sums * shrink + tl.sum(parts * shares[:, None], 0)
        maximum = raised
    token = tl.load(query_begins + row).to(tl.int64)
    at = (token * num_heads + head) * HEAD_DIM
    tl.store(output + at + dims, (sums / weight).to(output.dtype.element_ty), mask=real)


def attend_splits(
    output: Tensor,
    arguments: dict[str, Any],
    num_blocks: int,
    num_kv_heads: int,
    split_tokens: int,
    tiles: Tiles,
) -> None:
    """Fills `output` for decodes of more than `split_tokens` positions.

    Args:
        arguments: those that this kernel shares with the unified one.
        num_blocks: entries of all block tables together.
    """
    block_size, num_rows = arguments["BLOCK_SIZE"], arguments["num_rows"]
    _, num_heads, head_dim = output.shape
    items = num_blocks * block_size // split_tokens + num_rows
    partial = torch.empty(items, num_heads, head_dim, dtype=torch.float32, device=output.device)
    sums_log2 = torch.empty(items, num_heads, dtype=torch.float32, device=output.device)
    attend_split[(items, num_kv_heads)](
        partial,
        sums_log2,
        **arguments,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        SPLIT=split_tokens,
        **tiles.options(),
    )
    join_splits[(num_rows, num_heads)](
        output,
        partial,
        sums_log2,
        arguments["query_begins"],
        arguments["context_lens"],
        arguments["block_begins"],
        HEAD_DIM=head_dim,
        HEAD_PADDED=arguments["HEAD_PADDED"],
        BLOCK_SIZE=block_size,
        SPLIT=split_tokens,
        JOINED=JOINED,
        num_warps=4,
    )
