"""Sampling without a sort: a program finds a row's limits by bisection, then draws in one pass.

What top-k, top-p and min-p keep is a beginning of the row's order (best first, ties to the lower id).
It is described by a *depth*, the bits of how far a logit lies below the best, and by how many of the
entries at just that depth belong to it: positive floats order as their bits do. A pass over the row
tests BRANCHES depths at once, so that STEPS passes settle all bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.sampling import MIN_TEMPERATURE, DrawParams
from octavo.kernels.triton.helpers import check_inner, finite_or_zero
from octavo.kernels.triton.philox import gumbel_of_ids

BLOCK = 1024  # ids that a program looks at together
# Sixteen depths for each of 256 ids: 16 registers a thread at 8 warps.
NARROW = 256
NUM_WARPS = 8
BRANCHES = tl.constexpr(16)
STEPS = tl.constexpr(8)  # BRANCHES ** STEPS = 2^32
DEEPEST = tl.constexpr(0x7F800000)  # of -inf


@triton.jit
def depths_of(row, ids, mask, best, temperature):
    """How far each logit lies below the best, scaled: bits of a float32 that is not negative."""
    values = tl.load(row + ids, mask=mask, other=float("-inf"))
    below = (best - values) / temperature
    return tl.minimum(tl.maximum(below, 0.0).to(tl.int32, bitcast=True), DEEPEST)


@triton.jit
def weight_of(depths):
    """The share of a logit relative to the best one's."""
    return tl.exp(-depths.to(tl.float32, bitcast=True))


@triton.jit
def best_of(row, vocab_size, BLOCK: tl.constexpr):
    """The largest logit and its lowest id."""
    best = float("-inf")
    token = 0
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        largest = tl.max(values, 0)
        if largest > best:
            best = largest
            token = first + tl.argmax(values, 0, tie_break_left=True).to(tl.int32)
    return best, token


@triton.jit
def amounts(
    row,
    vocab_size,
    best,
    temperature,
    limits,
    min_p,
    deepest,
    COUNTS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """For each of ``limits`` what lies at or above that depth: how many entries, or their weight.

    Entries deeper than `deepest` or of a weight below `min_p` do not count.
    """
    total = tl.zeros(limits.shape, tl.float64)
    for first in range(0, vocab_size, NARROW):
        ids = first + tl.arange(0, NARROW)
        mask = ids < vocab_size
        depths = depths_of(row, ids, mask, best, temperature)
        weights = weight_of(depths)
        amount = tl.where(mask & (weights >= min_p) & (depths <= deepest), weights, 0.0)
        if COUNTS:
            amount = tl.where(mask, 1.0, 0.0)
        within = depths[None, :] <= limits[:, None]
        total += tl.sum(tl.where(within, amount[None, :], 0.0), 1).to(tl.float64)
    return total


@triton.jit
def least_depth(
    row,
    vocab_size,
    best,
    temperature,
    wanted,
    min_p,
    deepest,
    COUNTS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """The least depth at or above which at least `wanted` lies, and what lies above it."""
    low = tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float64)
    branches = tl.arange(0, BRANCHES)
    size = tl.full([], 1 << 28, tl.int64)
    for _ in range(STEPS):
        # Branch b holds the depths low + b * size .. low + (b + 1) * size.
        lasts = tl.minimum(low + (branches + 1) * size - 1, DEEPEST)
        found = amounts(
            row, vocab_size, best, temperature, lasts.to(tl.int32), min_p, deepest, COUNTS, NARROW
        )
        short = found < wanted
        branch = tl.minimum(tl.sum(short.to(tl.int32), 0), BRANCHES - 1)
        above = tl.maximum(above, tl.max(tl.where(branches < branch, found, 0.0), 0))
        low += (branch * size).to(tl.int32)
        size = size // BRANCHES
    return low, above


@triton.jit
def draw_rows(
    tokens,
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    samples,
    vocab_size,
    logits_row,  # stride, in entries
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    LEAST: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * logits_row
    best, token = best_of(row, vocab_size, BLOCK)
    temperature = tl.load(temperatures + index)
    if temperature > 0 and tl.abs(best) < float("inf"):
        temperature = tl.maximum(temperature, LEAST)
        min_p = tl.load(min_ps + index).to(tl.float32)
        depth, ties = limits_of(
            row,
            vocab_size,
            best,
            temperature,
            tl.load(top_ks + index),
            tl.load(top_ps + index).to(tl.float64),
            min_p,
            NARROW,
        )
        token = noisiest(
            row,
            vocab_size,
            best,
            temperature,
            min_p,
            depth,
            ties,
            tl.load(seeds + index),
            tl.load(positions + index),
            tl.load(samples + index),
            BLOCK,
        )
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit
def limits_of(row, vocab_size, best, temperature, top_k, top_p, min_p, NARROW: tl.constexpr):
    """The last depth that top-k and top-p keep, and how many of the entries at it."""
    depth = tl.full([], DEEPEST, tl.int32)
    ties = tl.full([], 0, tl.int64) + vocab_size
    if top_k > 0 and top_k < vocab_size:
        wanted = top_k.to(tl.float64)
        depth, above = least_depth(
            row, vocab_size, best, temperature, wanted, 0.0, DEEPEST, True, NARROW
        )
        ties = top_k.to(tl.int64) - above.to(tl.int64)
    if top_p < 1:
        limits = tl.zeros([BRANCHES], tl.int32) + (depth - 1)
        before = tl.max(
            amounts(row, vocab_size, best, temperature, limits, min_p, depth, False, NARROW), 0
        )
        share = weight_of(depth).to(tl.float64)
        # Entries of no weight need no count; without top-k these are the deepest.
        mass = before + tl.where(share.to(tl.float32) >= min_p, share * ties, 0.0)
        last = depth
        depth, above = least_depth(
            row, vocab_size, best, temperature, top_p * mass, min_p, last, False, NARROW
        )
        share = tl.maximum(weight_of(depth).to(tl.float64), 1e-300)
        fitting = tl.minimum(tl.ceil((top_p * mass - above) / share), vocab_size * 1.0).to(tl.int64)
        fitting = tl.maximum(fitting, 1)
        ties = tl.where(depth == last, tl.minimum(ties, fitting), fitting)
    return depth, ties


@triton.jit
def noisiest(
    row,
    vocab_size,
    best,
    temperature,
    min_p,
    depth,
    ties,
    seed,
    position,
    sample,
    BLOCK: tl.constexpr,
):
    """The id of the largest sum of scaled logit and noise among those kept; ties to the lower id."""
    most = float("-inf")
    token = 0
    seen = tl.full([], 0, tl.int64)  # entries at just `depth` so far
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        mask = ids < vocab_size
        depths = depths_of(row, ids, mask, best, temperature)
        edge = (mask & (depths == depth)).to(tl.int32)
        kept = mask & ((depths < depth) | ((edge > 0) & (seen + tl.cumsum(edge, 0) <= ties)))
        kept &= weight_of(depths) >= min_p
        seen += tl.sum(edge, 0)
        if tl.max(kept.to(tl.int32), 0) > 0:
            noise = gumbel_of_ids(seed, position, sample, first, BLOCK)
            noisy = tl.where(kept, noise - depths.to(tl.float32, bitcast=True), float("-inf"))
            largest = tl.max(noisy, 0)
            if largest > most:
                most = largest
                token = first + tl.argmax(noisy, 0, tie_break_left=True).to(tl.int32)
    return token


@triton.jit
def normalize_logits(normalizers, logits, vocab_size, logits_row, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * logits_row
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        raised = tl.maximum(maximum, values)
        base = finite_or_zero(raised)
        weight = weight * tl.exp(maximum - base) + tl.exp(values - base)
        maximum = raised
    largest = finite_or_zero(tl.max(maximum, 0))
    total = tl.sum(weight * tl.exp(maximum - largest), 0)
    tl.store(normalizers + index, largest + tl.log(total))


def sample(logits: Tensor, params: DrawParams, *, block: int = BLOCK, narrow: int = NARROW) -> Tensor:
    """The same as the reference's up to floating-point ties: int64 ``[num_rows]``.

    Args:
        block, narrow: ids looked at together in passes for one and for many values; powers of two.

    Raises:
        ValueError: logits that are not float32 or whose rows are not contiguous.
    """
    _check(logits)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        draw_rows[(num_rows,)](
            tokens,
            logits,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seeds,
            params.positions,
            params.samples,
            vocab_size,
            logits.stride(0),
            BLOCK=block,
            NARROW=narrow,
            LEAST=MIN_TEMPERATURE,
            num_warps=NUM_WARPS,
        )
    return tokens


def log_normalizer(logits: Tensor) -> Tensor:
    """The same as the reference's. Raises ValueError as `sample` does."""
    _check(logits)
    num_rows, vocab_size = logits.shape
    normalizers = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        normalize_logits[(num_rows,)](
            normalizers, logits, vocab_size, logits.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return normalizers


def _check(logits: Tensor) -> None:
    if logits.dtype is not torch.float32:
        raise ValueError(f"logits: {logits.dtype} instead of float32")
    check_inner(logits=logits)
