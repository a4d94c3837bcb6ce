"""The gated activation of SwiGLU (Shazeer, 2020, equation 6)."""

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``[num_tokens, 2 * size]`` that holds the gates, then the ups."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
