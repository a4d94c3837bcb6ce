"""Sampling for CPUs: the reference's tokens without its full sorts and its full noise.

Top-k, top-p and min-p usually leave few candidates: those rows are settled among the CANDIDATES
largest logits or, should that prove too few, among MORE times as many. Rows without such a limit need
noise for the whole vocabulary; they are taken a few at a time, so that what is in work fits the
processor's cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.reference import sampling as reference
from octavo.kernels.reference.philox import gumbel_from_bits, gumbel_noise, key_of, philox4x32
from octavo.kernels.reference.sampling import DrawParams

CANDIDATES = 256
MORE = 16
ROWS_AT_ONCE = 8  # 64 rows of 49,152 ids on two cores: 58, 34 and 38 ms with 1, 8 and 32


def sample(
    logits: Tensor,
    params: DrawParams,
    argmax: Callable[[Tensor], Tensor] = reference.argmax,
    draw_all: Callable[[Tensor, DrawParams], Tensor] | None = None,
) -> Tensor:
    """The same as the reference's: int64 ``[num_rows]``.

    Args:
        argmax: the table's.
        draw_all: its own `draw_unlimited`, if any.
    """
    limited = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    sampled = params.temperature > 0
    tokens = torch.empty(len(logits), dtype=torch.int64) if bool(sampled.all()) else argmax(logits)
    few = torch.nonzero(sampled & limited).flatten()
    if len(few):
        own = params.rows(few)
        scaled = reference.scale(logits[few], own.temperature)
        tokens[few] = _draw_limited(scaled, own, min(CANDIDATES, logits.shape[1]))
    unlimited = torch.nonzero(sampled & ~limited).flatten()
    if len(unlimited) == len(logits):
        return (draw_all or draw_unlimited)(logits, params)
    if len(unlimited):
        tokens[unlimited] = (draw_all or draw_unlimited)(logits[unlimited], params.rows(unlimited))
    return tokens


def top_ids(logits: Tensor, k: int) -> Tensor:
    """The same as the reference's, but which of several equal logits come k-th is open."""
    return _best(logits, k)[1]


def _best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their ids, best first, ties to the lower id among them."""
    if k >= logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True)
    ids = logits.topk(k, dim=1).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw_limited(scaled: Tensor, params: DrawParams, candidates: int) -> Tensor:
    """Settles rows among their `candidates` best, and those that need more among MORE times as many."""
    values, ids = _best(scaled, candidates)
    kept = _kept(scaled, values, params)
    tokens = _draw_among(values, ids, kept, params)
    if candidates >= scaled.shape[1]:
        return tokens
    # The kept ones are all known unless the last candidate could have companions further down.
    last_kept = values.masked_fill(~kept, float("inf")).amin(dim=1)
    is_open = (last_kept <= values[:, -1]) | (params.top_k > candidates)
    rows = torch.nonzero(is_open).flatten()
    if len(rows):
        tokens[rows] = _draw_limited(scaled[rows], params.rows(rows), candidates * MORE)
    return tokens


def _kept(scaled: Tensor, values: Tensor, params: DrawParams) -> Tensor:
    """Which candidates may be drawn, right for rows whose kept ones are all candidates."""
    weights = values.double().exp()  # relative to the largest, whose weight is 1
    kept = (weights >= params.min_p[:, None]) & (values > float("-inf"))
    ranks = torch.arange(values.shape[1])
    kept &= (params.top_k[:, None] == 0) | (ranks < params.top_k[:, None])
    mass = (weights * kept).sum(dim=1)
    # Where no other limit ends the candidates, top-p's share is of those behind them, too.
    rows = torch.nonzero(kept[:, -1] & (params.top_p < 1)).flatten()
    if len(rows):
        mass[rows] = _mass_of_all(scaled[rows], params.min_p[rows])
    before = (weights * kept).cumsum(dim=1) - weights * kept
    kept &= (before < params.top_p[:, None] * mass[:, None]) | (params.top_p[:, None] >= 1)
    kept[:, 0] = True
    return kept


def _mass_of_all(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Sums weights in float64, in parts small enough to stay in the processor's cache."""
    mass = torch.zeros(len(scaled), dtype=torch.float64)
    for row, (values, least) in enumerate(zip(scaled, min_p.tolist(), strict=True)):
        weights = values.double().exp_()
        mass[row] = weights[weights >= least].sum() if least > 0 else weights.sum()
    return mass


def _draw_among(values: Tensor, ids: Tensor, kept: Tensor, params: DrawParams) -> Tensor:
    most = int(kept.sum(dim=1).max())
    ids, order = ids[:, :most].sort(dim=1)  # ascending, so that ties go to the lower id
    values, kept = values.gather(1, order), kept.gather(1, order)
    noise = gumbel_noise(params.seeds, params.positions, params.samples, ids)
    noisy = (values + noise).masked_fill(~kept, float("-inf"))
    return ids.gather(1, noisy.argmax(dim=1, keepdim=True)).squeeze(1)


def draw_unlimited(logits: Tensor, params: DrawParams) -> Tensor:
    """A token of each row's whole distribution: int64 ``[num_rows]``."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        rows = torch.arange(begin, min(begin + ROWS_AT_ONCE, len(logits)))
        tokens[rows] = _noisy(logits[rows], params.rows(rows)).argmax(dim=1)
    return tokens


def _noisy(logits: Tensor, params: DrawParams) -> Tensor:
    noise = _noise_of_all(params, logits.shape[1])
    return noise.add_(reference.scale(logits, params.temperature))


def _noise_of_all(params: DrawParams, vocab_size: int) -> Tensor:
    """``[num_rows, vocab_size]``: four ids share one counter, which is computed once here."""
    fourths = torch.arange(-(-vocab_size // 4)).expand(len(params.seeds), -1)
    zeros = torch.zeros_like(fourths)
    counter = (params.positions[:, None] + zeros, params.samples[:, None] + zeros, fourths, zeros)
    words = torch.stack(philox4x32(counter, key_of(params.seeds[:, None])), dim=-1)
    return gumbel_from_bits(words.flatten(1)[:, :vocab_size])
