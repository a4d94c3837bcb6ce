"""The parts that model definitions share. They hold weights; the operations come from the table."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.dataplane.loading.grouped import GroupedMatrix, join
from octavo.dataplane.loading.weights import Part, Ranges, Weights
from octavo.dataplane.models.shard import Split
from octavo.kernels.rows import PLAIN, AttentionForm, KvScales
from octavo.kernels.table import Kernels


@dataclass(frozen=True)
class ForwardState:
    """What the layers of one forward share."""

    positions: Tensor  # [num_tokens]
    rotations: list[Tensor]  # each [num_tokens, head_dim], rows of the model's rotary tables
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
        if isinstance(self.weight, GroupedMatrix) and isinstance(token_ids, Tensor):
            return torch.from_numpy(self.weight.rows(token_ids.numpy()).values())
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
        order: Tensor | None = None,
        rows: list[Ranges] | None = None,
    ) -> "Linear":
        """The layers of these names. Raises ModelError.

        Args:
            out_sizes: as the files have them.
            rows: those of each layer that this rank has.
            order: of all rows that it has, in place of the one in which the files have them.
        """
        cuts = [Part()] * len(names) if rows is None else [Part(rows=ranges) for ranges in rows]
        layers = list(zip(names, out_sizes, cuts, strict=True))
        parts = [weights.take_matrix(f"{name}.weight", (n, in_size), cut) for name, n, cut in layers]
        biases = [weights.take(f"{name}.bias", (n,), cut) for name, n, cut in layers] if bias else []
        if order is None:
            return cls(parts, biases, kernels)
        return cls([_rows(_joined(parts), order)], [torch.cat(biases)[order]] if bias else [], kernels)

    def prepare(self) -> None:
        """Lays the weight out for the device it is on. Must be called before `forward`."""
        self._prepared = self._kernels.prepare_linear(self.weight)
        self.weight = None

    def forward(self, hidden: Tensor) -> Tensor:
        return self._kernels.linear(hidden, self._prepared, self.bias)


class RowParallel(nn.Module):
    """A matrix product of which each rank has some columns; their sum is the whole."""

    def __init__(self, weight: Matrix, bias: Tensor | None, split: Split, kernels: Kernels) -> None:
        """
        Args:
            bias: of the whole; one rank alone adds it.
        """
        super().__init__()
        own = [] if bias is None or split.collectives.shard.rank else [bias]
        self.part = Linear([weight], own, kernels)
        self._collectives = split.collectives

    @classmethod
    def take(
        cls,
        weights: Weights,
        name: str,
        shape: tuple[int, int],
        columns: range,
        bias: bool,
        split: Split,
        kernels: Kernels,
    ) -> "RowParallel":
        """The layer of that name. Raises ModelError.

        Args:
            shape: rows and columns as the files have them.
            columns: those that this rank has.
        """
        weight = weights.take_matrix(f"{name}.weight", shape, Part(columns=(columns,)))
        taken = weights.take(f"{name}.bias", shape[:1]) if bias else None
        return cls(weight, taken, split, kernels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._collectives.all_reduce(self.part(hidden))


class VocabularyEmbedding(nn.Module):
    """The vector of each token, each from the rank that has it."""

    def __init__(self, weight: Matrix, split: Split) -> None:
        """
        Args:
            weight: this rank's tokens, ``[len(split.tokens), hidden_size]``.
        """
        super().__init__()
        self.own = Embedding(weight)
        self._tokens, self._collectives = split.tokens, split.collectives

    def forward(self, token_ids: Tensor) -> Tensor:
        """``[num_tokens, hidden_size]``."""
        if self._collectives.shard.size == 1:
            vectors: Tensor = self.own(token_ids)
            return vectors
        places = token_ids - self._tokens.start
        others = (places < 0) | (places >= len(self._tokens))
        part = self.own(places.masked_fill(others, 0)).masked_fill(others[:, None], 0.0)
        return self._collectives.all_reduce(part)


class VocabularyHead(nn.Module):
    """The logits of all tokens, each from the rank that has it."""

    def __init__(self, weight: Matrix, split: Split, kernels: Kernels) -> None:
        super().__init__()
        self.own = Linear([weight], [], kernels)
        self._sizes = [len(tokens) for tokens in split.vocabulary]
        self._collectives = split.collectives

    def forward(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]``."""
        return self._collectives.all_gather(self.own(hidden), self._sizes)


class RmsNorm(nn.Module):
    """Normalisation before a sub-layer."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        size: int,
        epsilon: float,
        kernels: Kernels,
        offset: float = 0.0,
    ) -> None:
        """
        Args:
            offset: what the files leave out of the weights.
        """
        super().__init__()
        self.weight = _held(weights.take(f"{name}.weight", (size,)) + offset)
        self._epsilon, self._kernels = epsilon, kernels

    def forward(self, hidden: Tensor) -> Tensor:
        return self._kernels.rms_norm(hidden, self.weight, self._epsilon)

    def after_adding(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normalised sum of the two, and the sum; without `residual` that is `hidden`."""
        if residual is None:
            return self(hidden), hidden
        return self._kernels.add_rms_norm(hidden, residual, self.weight, self._epsilon)


class RotaryAttention(nn.Module):
    """Rotates queries and keys, stores the new keys and values, attends over the blocks of each row."""

    def __init__(
        self, layer: int, scale: float, kernels: Kernels, form: AttentionForm = PLAIN, table: int = 0
    ) -> None:
        """
        Args:
            scale: factor of the scores.
            table: which of the model's rotary tables the layer turns by.
        """
        super().__init__()
        self._layer, self._scale, self._kernels = layer, scale, kernels
        self._form, self._table = form, table

    def forward(self, heads: Tensor, state: ForwardState) -> Tensor:
        """``[num_tokens, num_heads, head_dim]`` of queries, keys and values side by side."""
        key_cache, value_cache = state.key_caches[self._layer], state.value_caches[self._layer]
        query = self._kernels.rotary_kv_write(
            heads,
            state.rotations[self._table],
            key_cache,
            value_cache,
            state.kv_slots,
            state.kv_scales,
        )
        return self._kernels.paged_attention(
            query, key_cache, value_cache, state.rows, self._scale, self._form, state.kv_scales
        )


class HeadNorms(nn.Module):
    """Normalises each head of queries and keys, all by the same weights; values pass."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        head_dim: int,
        num_kv_heads: int,
        epsilon: float,
        kernels: Kernels,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.query = RmsNorm(weights, f"{name}.q_norm", head_dim, epsilon, kernels, offset)
        self.key = RmsNorm(weights, f"{name}.k_norm", head_dim, epsilon, kernels, offset)
        self._num_kv_heads = num_kv_heads

    def forward(self, heads: Tensor) -> Tensor:
        """``[num_tokens, num_heads, head_dim]`` of queries, keys and values side by side."""
        kv = self._num_kv_heads
        query, keys = (
            _normed(heads[:, : -2 * kv], self.query),
            _normed(heads[:, -2 * kv : -kv], self.key),
        )
        return torch.cat((query, keys, heads[:, -kv:]), dim=1)


def _normed(heads: Tensor, norm: RmsNorm) -> Tensor:
    _, num_heads, head_dim = heads.shape
    normed: Tensor = norm(heads.reshape(-1, head_dim))
    return normed.view(-1, num_heads, head_dim)


class GatedMlp(nn.Module):
    """``down(activation(gate(x)) * up(x))``, of silu (SwiGLU) or of GELU by its tanh (GeGLU)."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden: int,
        inner: int,
        bias: bool,
        kernels: Kernels,
        split: Split,
        fused: bool = False,
        gelu: bool = False,
    ) -> None:
        """
        Args:
            inner: size of the whole, of which this rank computes a part.
            fused: whether the files have gate and up as one matrix, ``gate_up_proj``.
            gelu: whether the activation is GELU in place of silu.
        """
        super().__init__()
        names, sizes, own = ["gate_proj", "up_proj"], [inner, inner], split.inner
        rows: list[Ranges] = [(own,), (own,)]
        if fused:
            names, sizes = ["gate_up_proj"], [2 * inner]
            rows = [(own, range(inner + own.start, inner + own.stop))]
        gate_up = [f"{name}.{part}" for part in names]
        self.gate_up = Linear.take(weights, gate_up, hidden, sizes, bias, kernels, rows=rows)
        down, shape = f"{name}.down_proj", (hidden, inner)
        self.down = RowParallel.take(weights, down, shape, own, bias, split, kernels)
        self._activate = partial(_gelu_mul, len(own)) if gelu else kernels.silu_mul

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down(self._activate(self.gate_up(hidden)))
        return down


def _gelu_mul(inner: int, gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` for ``[num_tokens, 2 * inner]`` that holds the gates, then the ups."""
    return F.gelu(gate_up[:, :inner], approximate="tanh") * gate_up[:, inner:]


def _joined(parts: list[Matrix]) -> Matrix:
    """The matrices below one another, in float32 where they are not all stored alike."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedMatrix)]
    joined = join(grouped) if len(grouped) == len(parts) else None
    return torch.cat([_plain(part) for part in parts]) if joined is None else joined


def _rows(matrix: Matrix, order: Tensor) -> Matrix:
    return matrix.rows(order.numpy()) if isinstance(matrix, GroupedMatrix) else matrix[order]


def _plain(matrix: Matrix) -> Tensor:
    return torch.from_numpy(matrix.values()) if isinstance(matrix, GroupedMatrix) else matrix


def _held(matrix: Matrix) -> Any:
    """As a module keeps it: tensors move with the module to its device."""
    if isinstance(matrix, GroupedMatrix):
        return matrix
    return nn.Parameter(matrix.contiguous(), requires_grad=False)
