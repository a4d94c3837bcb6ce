"""Root-mean-square normalisation on CPUs: one fused call."""

from torch import Tensor
from torch.nn import functional as F


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same as the reference's."""
    return F.rms_norm(hidden, weight.shape, weight, epsilon)
