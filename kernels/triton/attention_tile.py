"""The inner loop of attention: one tile of queries over a range of positions of one row."""

import triton
import triton.language as tl

from octavo.kernels.triton.helpers import FP8_UNIT, LOG2_E, finite_or_zero, load_cached, soft_capped


@triton.jit
def head_of(cache, scales, head, block_stride, head_stride, token_stride):
    """One KV head of a cache: where it begins, its strides, and what its entries are multiplied by."""
    factor = 1.0
    if scales is not None:
        factor = tl.load(scales + head) * FP8_UNIT
    return cache + head.to(tl.int64) * head_stride, block_stride, token_stride, factor


@triton.jit
def first_seen(position, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Where to begin for a query at `position`: a multiple of KEYS, whatever the tile it is in."""
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(position + 1 - WINDOW, 0) // KEYS * KEYS
    return begin


@triton.jit
def attend_tile(
    query, positions, begin, end, table, keys, values, scale,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attention of a tile to the positions begin .. end of a row.

    Args:
        query: ``[rows, padded head_dim]``; `positions` ``[rows]`` are its own.
        table: pointer to the row's block table.
        keys, values: of `head_of`.

    Returns:
        the attended values ``[rows, padded head_dim]``, and ``[rows]`` the logarithms in base 2 of what
        the exponentials sum up to; -inf, and zeros, for a row that sees nothing.
    """
    maxima = tl.full([query.shape[0]], float("-inf"), tl.float32)
    weight = tl.zeros([query.shape[0]], tl.float32)
    sums = tl.zeros(query.shape, tl.float32)
    scale *= keys[3]
    for first in range(begin, end, KEYS):
        seen_at = first + tl.arange(0, KEYS)
        known = seen_at < end
        blocks = tl.load(table + seen_at // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        loaded = load_tile(keys, blocks, seen_at % BLOCK_SIZE, known, query, HEAD_DIM)
        scores = tl.dot(query, tl.trans(loaded), input_precision="ieee") * scale
        if SOFT_CAP is not None:
            scores = soft_capped(scores, SOFT_CAP)
        seen = known[None, :] & (seen_at[None, :] <= positions[:, None])
        if WINDOW is not None:
            seen &= seen_at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        raised = tl.maximum(maxima, tl.max(scores, 1))
        base = finite_or_zero(raised)
        shares, shrink = tl.exp2(scores - base[:, None]), tl.exp2(maxima - base)
        loaded = load_tile(values, blocks, seen_at % BLOCK_SIZE, known, query, HEAD_DIM)
        weight = weight * shrink + tl.sum(shares, 1)
        sums = tl.dot(shares.to(query.dtype), loaded, sums * shrink[:, None], input_precision="ieee")
        maxima = raised
    some = weight > 0
    weight = tl.where(some, weight, 1.0)
    return sums / weight[:, None] * values[3], tl.where(some, maxima + tl.log2(weight), float("-inf"))


@triton.jit
def load_tile(side, blocks, inside, known, query, HEAD_DIM: tl.constexpr):
    """Keys or values of some positions: ``[positions, padded head_dim]`` in the query's type.

    What is not known is 0, of values, too: it may be NaN, and 0 * NaN is NaN.
    """
    pointer, block_stride, token_stride, _ = side
    dims = tl.arange(0, query.shape[1])
    at = blocks * block_stride + inside * token_stride
    mask = known[:, None] & (dims < HEAD_DIM)[None, :]
    return load_cached(pointer + at[:, None] + dims[None, :], mask, query.dtype)
