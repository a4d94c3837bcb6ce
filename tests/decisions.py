"""How sure draws are: how far from another outcome the logits of each row leave them."""

import torch
from torch import Tensor

from octavo.kernels.reference.philox import gumbel_noise
from octavo.kernels.reference.sampling import DrawParams, scale


def decision_margins(logits: Tensor, params: DrawParams, slack: float) -> Tensor:
    """For draws with a temperature and top-p: ``[num_rows]``.

    Tokens whose place at the edge of the nucleus is a matter of less than `slack` of probability may
    be in it or not. The margin is what the best perturbed score is above the second best of the tokens
    that may be in; it is 0 where the best one itself may be out.
    """
    scaled = scale(logits, params.temperature)
    probabilities, ids = torch.softmax(scaled.double(), dim=1).sort(dim=1, descending=True)
    before = probabilities.cumsum(dim=1) - probabilities
    most = max(2, int((before < params.top_p[:, None] + slack).sum(dim=1).max()))
    before, ids = before[:, :most], ids[:, :most]
    noise = gumbel_noise(params.seeds, params.positions, params.samples, ids)
    scores = scaled.gather(1, ids) + noise
    out = before >= params.top_p[:, None] + slack
    best = scores.masked_fill(out, float("-inf")).topk(2, dim=1)
    sure = before.gather(1, best.indices[:, :1]).squeeze(1) < params.top_p - slack
    return torch.where(sure, best.values[:, 0] - best.values[:, 1], 0.0)
