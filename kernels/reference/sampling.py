"""From logits to tokens: edits of single logits, then one draw per row.

Rows never affect one another. Edits change ``logits`` ``[num_rows, vocab_size]`` in place and name
single entries by parallel arrays `rows` and `ids`, each entry at most once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.reference.philox import gumbel_noise

# Below this all temperatures draw alike: the smallest gap between two logits outweighs any noise.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class DrawParams:
    """How each of num_rows rows draws; all tensors are ``[num_rows]``."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float64, (0, 1]
    min_p: Tensor  # float64, [0, 1]
    seeds: Tensor  # int64, the bits of the unsigned seed
    positions: Tensor  # int64, of the token being drawn
    samples: Tensor  # int64, index of the sample in its request

    def rows(self, indices: Tensor) -> "DrawParams":
        """The parameters of some of the rows."""
        return DrawParams(**{name: values[indices] for name, values in vars(self).items()})


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Adds `values` to single logits."""
    logits[rows, ids] += values.to(logits.dtype)


def forbid(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Makes single tokens impossible."""
    logits[rows, ids] = float("-inf")


def penalize_repetition(logits: Tensor, rows: Tensor, ids: Tensor, penalties: Tensor) -> None:
    """Divides positive and multiplies negative logits (CTRL, Keskar et al. 2019, section 4.1)."""
    seen = logits[rows, ids]
    penalties = penalties.to(logits.dtype)
    logits[rows, ids] = torch.where(seen > 0, seen / penalties, seen * penalties)


def penalize_output(
    logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Subtracts ``presence + count * frequency`` from the logits of tokens drawn already."""
    logits[rows, ids] -= (presence + counts * frequency).to(logits.dtype)


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """One token id per row: int64 ``[num_rows]``.

    Greedy rows take the largest logit. The others scale by the temperature, drop what min-p, then
    top-k, then top-p exclude, and take the largest of logit + Gumbel noise, which draws from the
    softmax of what is kept (Gumbel 1954; the Gumbel-max trick). Ties go to the lower id.
    """
    scaled = scale(logits, params.temperature)
    order, kept = kept_candidates(scaled, params)
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    keep = torch.zeros_like(kept).scatter_(1, order, kept)
    noise = gumbel_noise(params.seeds, params.positions, params.samples, ids)
    noisy = (scaled + noise).masked_fill(~keep, float("-inf"))
    return torch.where(params.temperature == 0, argmax(logits), argmax(noisy))


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """``(logit - largest) / temperature``: at most 0 and never NaN, however small the temperature.

    The rows of greedy draws are meaningless, but finite or -inf as well.
    """
    largest = logits.amax(dim=1, keepdim=True)
    largest = torch.where(torch.isinf(largest), torch.zeros_like(largest), largest)
    divisor = temperature.clamp(min=MIN_TEMPERATURE).to(logits.dtype)
    return (logits - largest) / divisor[:, None]


def kept_candidates(scaled: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """The ids of each row, best first, and which of them may be drawn: two ``[num_rows, n]``."""
    values, order = torch.sort(scaled.double(), dim=1, descending=True, stable=True)
    probabilities = torch.softmax(values, dim=1).nan_to_num()
    kept = probabilities >= params.min_p[:, None] * probabilities[:, :1]
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    kept &= (params.top_k[:, None] == 0) | (ranks < params.top_k[:, None])
    kept &= within_top_p(probabilities * kept, params.top_p)
    return order, kept


def within_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Marks the fewest of the best whose share reaches top_p (Holtzman et al. 2020, section 3.1).

    Args:
        weights: ``[num_rows, n]`` in descending order, of any sum.
        top_p: ``[num_rows]``; 1 keeps everything.
    """
    before = weights.cumsum(dim=1) - weights
    enough = top_p[:, None] * weights.sum(dim=1, keepdim=True)
    keep = (before < enough) | (top_p[:, None] >= 1)
    keep[:, 0] = True
    return keep


def argmax(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, ties to the lower; NaN is largest: int64 ``[num_rows]``."""
    return logits.argmax(dim=1)


def log_normalizer(logits: Tensor) -> Tensor:
    """``[num_rows]``: what to subtract from a row's logits to get log-probabilities."""
    return torch.logsumexp(logits, dim=1)


def top_ids(logits: Tensor, k: int) -> Tensor:
    """The ids of each row's k largest logits, best first, ties to the lower id: ``[num_rows, k]``."""
    return torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
