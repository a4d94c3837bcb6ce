"""How sure the decisions behind sampled tokens were, judged by the reference model and noise."""

import torch
from reference_model import reference_logprobs

from octavo.kernels.reference.philox import gumbel_noise


def sampled_margins(
    prompt: list[int], outputs: list[int], seed: int, sample: int, temperature: float = 1.0
) -> list[float]:
    """For each output the gap between the best and the second-best perturbed log-probability.

    The best one must be the output itself, else the gap is negative. Nothing but temperature may
    have shaped the distribution.
    """
    rows = reference_logprobs(prompt + outputs)[len(prompt) - 1 :].float()
    count, vocabulary = rows.shape
    noise = gumbel_noise(
        torch.full((count,), seed),
        torch.arange(len(prompt), len(prompt) + count),
        torch.full((count,), sample),
        torch.arange(vocabulary).expand(count, vocabulary),
    )
    scores = rows / temperature + noise
    own = scores.gather(1, torch.tensor(outputs)[:, None]).squeeze(1)
    others = scores.scatter(1, torch.tensor(outputs)[:, None], float("-inf")).amax(dim=1)
    return (own - others).tolist()
