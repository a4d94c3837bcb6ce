"""Sampling for CPUs: the reference's tokens without its full sorts and its full noise.

Top-k, top-p and min-p usually leave few candidates: those rows are settled among the MAX_CANDIDATES
largest logits. Rows without such a limit need noise for every token that it could lift to the top;
noise lies in an interval of width 19.46, so tokens further down than that are left out.
"""

import torch
from torch import Tensor

from octavo.kernels.reference import sampling as reference
from octavo.kernels.reference.philox import gumbel_from_bits, gumbel_noise, key_of, philox4x32
from octavo.kernels.reference.sampling import DrawParams

MAX_CANDIDATES = 512
NOISE_WIDTH = 19.5


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """The same as the reference's: int64 ``[num_rows]``."""
    tokens = logits.argmax(dim=1)
    limited = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    sampled = params.temperature > 0
    few = torch.nonzero(sampled & limited).flatten()
    if len(few):
        tokens[few] = _draw_limited(logits[few], params.rows(few))
    for row in torch.nonzero(sampled & ~limited).flatten():
        one = params.rows(row[None])
        scaled = reference.scale(logits[row][None], one.temperature)
        tokens[row] = _draw_unlimited(scaled, one)
    return tokens


def top_ids(logits: Tensor, k: int) -> Tensor:
    """The same as the reference's, but which of several equal logits come k-th is open."""
    return _best(logits, k)[1]


def _best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their ids, best first, ties to the lower id among them."""
    ids = logits.topk(k, dim=1).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw_limited(logits: Tensor, params: DrawParams) -> Tensor:
    scaled = reference.scale(logits, params.temperature)
    values, ids = _best(scaled, min(MAX_CANDIDATES, scaled.shape[1]))
    kept = _kept(scaled, values, params)
    tokens = _draw_among(values, ids, kept, params)
    # The kept ones are all known unless the last candidate could have companions further down.
    last_kept = values.masked_fill(~kept, float("inf")).amin(dim=1)
    is_open = (last_kept <= values[:, -1]) | (params.top_k > ids.shape[1])
    rows = torch.nonzero(is_open & (ids.shape[1] < scaled.shape[1])).flatten()
    if len(rows):
        tokens[rows] = reference.sample(logits[rows], params.rows(rows))
    return tokens


def _kept(scaled: Tensor, values: Tensor, params: DrawParams) -> Tensor:
    """Which candidates may be drawn, right for rows whose kept ones are all candidates."""
    weights = values.double().exp()  # relative to the largest, whose weight is 1
    kept = (weights >= params.min_p[:, None]) & (values > float("-inf"))
    ranks = torch.arange(values.shape[1])
    kept &= (params.top_k[:, None] == 0) | (ranks < params.top_k[:, None])
    # Where no other limit ends the candidates, top-p's share is of those behind them, too.
    mass = torch.where(kept[:, -1], _mass_of_all(scaled, params.min_p), (weights * kept).sum(dim=1))
    before = (weights * kept).cumsum(dim=1) - weights * kept
    kept &= (before < params.top_p[:, None] * mass[:, None]) | (params.top_p[:, None] >= 1)
    kept[:, 0] = True
    return kept


def _mass_of_all(scaled: Tensor, min_p: Tensor) -> Tensor:
    weights = scaled.double().exp()
    return weights.masked_fill_(weights < min_p[:, None], 0.0).sum(dim=1)


def _draw_among(values: Tensor, ids: Tensor, kept: Tensor, params: DrawParams) -> Tensor:
    most = int(kept.sum(dim=1).max())
    ids, order = ids[:, :most].sort(dim=1)  # ascending, so that ties go to the lower id
    values, kept = values.gather(1, order), kept.gather(1, order)
    noise = gumbel_noise(params.seeds, params.positions, params.samples, ids)
    noisy = (values + noise).masked_fill(~kept, float("-inf"))
    return ids.gather(1, noisy.argmax(dim=1, keepdim=True)).squeeze(1)


def _draw_unlimited(scaled: Tensor, params: DrawParams) -> Tensor:
    """For one row ``[1, vocab_size]``."""
    vocab_size = scaled.shape[1]
    ids = torch.nonzero(scaled[0] >= -NOISE_WIDTH).flatten()
    if len(ids) * 4 >= vocab_size or not len(ids):  # none: all are -inf or NaN
        return (scaled + _noise_of_all(params, vocab_size)).argmax(dim=1)
    noise = gumbel_noise(params.seeds, params.positions, params.samples, ids[None])
    return ids[(scaled[0, ids] + noise).argmax(dim=1)]


def _noise_of_all(params: DrawParams, vocab_size: int) -> Tensor:
    """``[1, vocab_size]``: four ids share one counter, which is computed once here."""
    fourths = torch.arange(-(-vocab_size // 4))
    zeros = torch.zeros_like(fourths)
    counter = (params.positions + zeros, params.samples + zeros, fourths, zeros)
    words = torch.stack(philox4x32(counter, key_of(params.seeds)), dim=-1)
    return gumbel_from_bits(words.reshape(1, -1)[:, :vocab_size])
