"""The decoder of families before rotary embeddings: learned positions, LayerNorm and biases, as in
Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.layers import (
    Embedding,
    ForwardState,
    Linear,
    Matrix,
    RowParallel,
    VocabularyEmbedding,
    VocabularyHead,
)
from octavo.dataplane.models.model import Model
from octavo.dataplane.models.shard import Split
from octavo.kernels.table import Kernels

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu_new": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "gelu": F.gelu,
}


@dataclass(frozen=True)
class LearnedConfig:
    """The numbers of such a model."""

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    norm_epsilon: float
    activation: str  # a key of ACTIVATIONS

    def check(self, files: ModelFiles) -> None:
        """Raises ModelError."""
        if self.hidden_size % self.num_heads:
            raise ModelError(
                f"{files.path}: {self.num_heads} heads do not divide the hidden size {self.hidden_size}"
            )
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelError(
                f"{files.path}: the activation {self.activation!r} is not supported; these are: {known}"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class LayerNorm(nn.Module):
    """Ba et al., 2016: each vector to a mean of 0 and a variance of 1, then by weight and bias."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        super().__init__()
        weight, bias = (weights.take(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self._epsilon)


class PlainAttention(nn.Module):
    """Stores the new keys and values, attends over the blocks of each row."""

    def __init__(self, layer: int, num_heads: int, head_dim: int, kernels: Kernels) -> None:
        super().__init__()
        self._layer, self._num_heads, self._head_dim = layer, num_heads, head_dim
        self._kernels = kernels

    def forward(self, qkv: Tensor, state: ForwardState) -> Tensor:
        """``[num_tokens, num_heads * head_dim]`` from queries, keys and values side by side."""
        count, kernels = self._num_heads, self._kernels
        heads = qkv.view(qkv.shape[0], 3 * count, self._head_dim)
        query, keys, values = heads[:, :count], heads[:, count : 2 * count], heads[:, 2 * count :]
        caches = state.key_caches[self._layer], state.value_caches[self._layer]
        kernels.kv_write(keys, values, *caches, state.kv_slots, state.kv_scales)
        scale, scales = self._head_dim**-0.5, state.kv_scales
        attended = kernels.paged_attention(query, *caches, state.rows, scale, scales=scales)
        return attended.reshape(qkv.shape[0], -1)


@dataclass(frozen=True)
class LayerParts:
    """What a family's files call differently, of one layer."""

    attention_norm: LayerNorm
    qkv: Linear
    out: RowParallel
    mlp_norm: LayerNorm
    up: Linear
    down: RowParallel


class LearnedLayer(nn.Module):
    """Attention, then the MLP, each normalised before and added to what came in."""

    def __init__(
        self, config: LearnedConfig, layer: int, parts: LayerParts, kernels: Kernels, split: Split
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = parts.attention_norm, parts.mlp_norm
        self.qkv, self.out = parts.qkv, parts.out
        self.up, self.down = parts.up, parts.down
        self.attend = PlainAttention(layer, len(split.heads), config.head_dim, kernels)
        self._activate = ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor, state: ForwardState) -> Tensor:
        attended = self.attend(self.qkv(self.attention_norm(hidden)), state)
        hidden = hidden + self.out(attended)
        added: Tensor = hidden + self.down(self._activate(self.up(self.mlp_norm(hidden))))
        return added


class LearnedDecoder(Model):
    """The whole model; its head shares the embedding's weights."""

    def __init__(
        self,
        config: LearnedConfig,
        embedding: Matrix,
        positions: Tensor,
        layers: list[LearnedLayer],
        norm: LayerNorm,
        kernels: Kernels,
        split: Split,
    ) -> None:
        """
        Args:
            embedding: of this rank's tokens.
            positions: what is added at each position, ``[max_positions, hidden_size]``.
        """
        super().__init__()
        self.config, self.split = config, split
        self.embedding, self.positions = VocabularyEmbedding(embedding, split), Embedding(positions)
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.head = VocabularyHead(embedding, split, kernels)
        self.register_buffer("rotations", torch.zeros(0, 0, config.head_dim), persistent=False)

    def embed(self, token_ids: Tensor, state: ForwardState) -> Tensor:
        embedded: Tensor = self.embedding(token_ids) + self.positions(state.positions)
        return embedded

    def body(self, hidden: Tensor, state: ForwardState) -> tuple[Tensor, ...]:
        for layer in self.layers:
            hidden = layer(hidden, state)
        return (hidden,)

    def finish(self, *parts: Tensor) -> Tensor:
        normed: Tensor = self.norm(*parts)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits.float()
