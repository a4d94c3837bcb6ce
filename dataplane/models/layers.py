"""The parts that model definitions share. They hold weights; the operations come from the table."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.dataplane.loading.grouped import GroupedMatrix, join
from octavo.dataplane.loading.weights import Weights
from octavo.kernels.rows import PLAIN, KvScales
from octavo.kernels.table import Kernels


@dataclass(frozen=True)
class ForwardState:
    """What the layers of one forward share."""

    rotations: Tensor  # [num_tokens, head_dim], rows of the rotary table
    rows: Any  # of kernels.prepare_attention
    kv_slots: Any  # of kernels.prepare_kv_write
    key_caches: list[Tensor]  # one per layer
    value_caches: list[Tensor]
    kv_scales: KvScales | None = None  # of fp8 caches, the same for all layers


Matrix = Tensor | GroupedMatrix


class Embedding(nn.Module):
    """The vector of each token."""

    def __init__(self, weight: Matrix) -> None:
        super().__init__()
        self.weight: Any = _held(weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """``[num_tokens, hidden_size]``."""
        return F.embedding(token_ids, self.weight)


class Linear(nn.Module):
    """One matrix product, or several of the same input side by side."""

    def __init__(self, parts: list[Matrix], biases: list[Tensor], kernels: Kernels) -> None:
        super().__init__()
        self.weight: Any = _held(_joined(parts))
        self.bias = _held(torch.cat(biases)) if biases else None
        self._prepared: Any = None
        self._kernels = kernels

    @classmethod
    def take(
        cls,
        weights: Weights,
        names: list[str],
        in_size: int,
        out_sizes: list[int],
        bias: bool,
        kernels: Kernels,
    ) -> "Linear":
        """The layers of these names. Raises ModelError."""
        pairs = list(zip(names, out_sizes, strict=True))
        parts = [weights.take_matrix(f"{name}.weight", (size, in_size)) for name, size in pairs]
        biases = [weights.take(f"{name}.bias", (size,)) for name, size in pairs] if bias else []
        return cls(parts, biases, kernels)

    def prepare(self) -> None:
        """Lays the weight out for the device it is on. Must be called before `forward`."""
        self._prepared = self._kernels.prepare_linear(self.weight)
        self.weight = None

    def forward(self, hidden: Tensor) -> Tensor:
        return self._kernels.linear(hidden, self._prepared, self.bias)


class RmsNorm(nn.Module):
    """Normalisation before a sub-layer."""

    def __init__(
        self, weights: Weights, name: str, size: int, epsilon: float, kernels: Kernels
    ) -> None:
        super().__init__()
        self.weight = _held(weights.take(f"{name}.weight", (size,)))
        self._epsilon, self._kernels = epsilon, kernels

    def forward(self, hidden: Tensor) -> Tensor:
        return self._kernels.rms_norm(hidden, self.weight, self._epsilon)

    def after_adding(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum of the two, and the sum."""
        return self._kernels.add_rms_norm(hidden, residual, self.weight, self._epsilon)


class RotaryAttention(nn.Module):
    """Rotates queries and keys, stores the new keys and values, attends over the blocks of each row."""

    def __init__(self, layer: int, head_dim: int, kernels: Kernels) -> None:
        super().__init__()
        self._layer, self._scale, self._kernels = layer, head_dim**-0.5, kernels

    def forward(self, heads: Tensor, state: ForwardState) -> Tensor:
        """``[num_tokens, num_heads, head_dim]`` of queries, keys and values side by side."""
        key_cache, value_cache = state.key_caches[self._layer], state.value_caches[self._layer]
        query = self._kernels.rotary_kv_write(
            heads, state.rotations, key_cache, value_cache, state.kv_slots, state.kv_scales
        )
        return self._kernels.paged_attention(
            query, key_cache, value_cache, state.rows, self._scale, PLAIN, state.kv_scales
        )


class GatedMlp(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self, weights: Weights, name: str, hidden: int, inner: int, bias: bool, kernels: Kernels
    ) -> None:
        super().__init__()
        gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up = Linear.take(weights, gate_up, hidden, [inner, inner], bias, kernels)
        self.down = Linear.take(weights, [f"{name}.down_proj"], inner, [hidden], bias, kernels)
        self._kernels = kernels

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down(self._kernels.silu_mul(self.gate_up(hidden)))
        return down


def _joined(parts: list[Matrix]) -> Matrix:
    """The matrices below one another, in float32 where they are not all stored alike."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedMatrix)]
    joined = join(grouped) if len(grouped) == len(parts) else None
    return torch.cat([_plain(part) for part in parts]) if joined is None else joined


def _plain(matrix: Matrix) -> Tensor:
    return torch.from_numpy(matrix.values()) if isinstance(matrix, GroupedMatrix) else matrix


def _held(matrix: Matrix) -> Any:
    """As a module keeps it: tensors move with the module to its device."""
    if isinstance(matrix, GroupedMatrix):
        return matrix
    return nn.Parameter(matrix.contiguous(), requires_grad=False)
