"""The decoder that several families share: normalised attention and a gated MLP, each added to what
came in (Touvron et al., "LLaMA", 2023, section 2.2), with grouped-query attention. What a family has
of its own, its file says by the `DecoderConfig` that it makes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.loading.weights import Part, Ranges, Weights
from octavo.dataplane.models.config import DecoderConfig
from octavo.dataplane.models.layers import (
    ForwardState,
    GatedMlp,
    HeadNorms,
    Linear,
    RmsNorm,
    RotaryAttention,
    RowParallel,
    VocabularyEmbedding,
    VocabularyHead,
)
from octavo.dataplane.models.model import Model
from octavo.dataplane.models.rope import rope_table
from octavo.dataplane.models.shard import Collectives, Split
from octavo.kernels.reference.rotary import inverse_frequencies, rotary_table
from octavo.kernels.rows import AttentionForm
from octavo.kernels.table import Kernels


class DecoderAttention(nn.Module):
    """Projections and rotary embedding around paged attention."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: Weights, kernels: Kernels, split: Split
    ) -> None:
        super().__init__()
        name, size = f"model.layers.{layer}.self_attn", config.hidden_size
        self._head_dim = config.head_dim
        self.qkv = _qkv(config, name, weights, kernels, split)
        out, shape = f"{name}.o_proj", (size, config.num_heads * self._head_dim)
        own, bias = split.attended, config.out_bias
        self.out = RowParallel.take(weights, out, shape, own, bias, split, kernels)
        self.attend = _attend(config, layer, kernels)
        self.head_norms: HeadNorms | None = None
        if config.head_norms:
            sizes, epsilon = (self._head_dim, len(split.kv_heads)), config.norm_epsilon
            self.head_norms = HeadNorms(weights, name, *sizes, epsilon, kernels, config.norm_offset)

    def forward(self, hidden: Tensor, state: ForwardState) -> Tensor:
        heads = self.qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        if self.head_norms is not None:
            heads = self.head_norms(heads)
        out: Tensor = self.out(self.attend(heads, state).reshape(hidden.shape[0], -1))
        return out


def _attend(config: DecoderConfig, layer: int, kernels: Kernels) -> RotaryAttention:
    window = config.windows[layer]
    scale = config.score_scale or config.head_dim**-0.5
    table = 1 if window is not None and config.local_theta is not None else 0
    return RotaryAttention(layer, scale, kernels, AttentionForm(window=window), table)


def _qkv(config: DecoderConfig, name: str, weights: Weights, kernels: Kernels, split: Split) -> Linear:
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    own = [split.heads, split.kv_heads, split.kv_heads]
    sizes = [count * config.head_dim for count in heads]
    names = [f"{name}.{part}_proj" for part in "qkv"]
    rows: list[Ranges] = [(split.rows_of(part),) for part in own]
    if config.fused:
        firsts = [0, sizes[0], sizes[0] + sizes[1]]
        rows = [tuple(split.rows_of(part, first) for part, first in zip(own, firsts, strict=True))]
        names, sizes = [f"{name}.qkv_proj"], [sum(sizes)]
    order = None
    if config.rotary_dim != config.head_dim:
        turning = len(split.heads) + len(split.kv_heads)
        order = turning_rows(config.head_dim, config.rotary_dim, turning, len(split.kv_heads))
    bias = config.qkv_bias
    return Linear.take(weights, names, config.hidden_size, sizes, bias, kernels, order, rows)


def turning_rows(head_dim: int, rotary_dim: int, num_turning: int, num_other: int) -> Tensor:
    """The order of projection rows in which the pairs that turn come first in both halves of a head.

    The rotary operation pairs dimension i with i + head_dim / 2, and such files with
    i + rotary_dim / 2. Scores stay the same when queries and keys are reordered alike:

        in the file     a0 a1 b0 b1 x0 x1 y0 y1        rotary_dim = 4 of 8
        here            a0 a1 x0 x1 b0 b1 y0 y1

    Args:
        num_turning: heads of queries and keys.
        num_other: heads of values, which keep their order.
    """
    half, rest = rotary_dim // 2, rotary_dim + (head_dim - rotary_dim) // 2
    dims = torch.arange(head_dim)
    turned = torch.cat((dims[:half], dims[rotary_dim:rest], dims[half:rotary_dim], dims[rest:]))
    heads = torch.stack([turned] * num_turning + [dims] * num_other)
    return (heads + head_dim * torch.arange(len(heads))[:, None]).flatten()


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each normalised before and added to what came in.

    What the layers pass on is the sum of two: the next norm adds them as it reads them.
    """

    def __init__(
        self, config: DecoderConfig, layer: int, weights: Weights, kernels: Kernels, split: Split
    ) -> None:
        super().__init__()
        name, size, epsilon = f"model.layers.{layer}", config.hidden_size, config.norm_epsilon
        self.attention_norm = RmsNorm(weights, f"{name}.input_layernorm", size, epsilon, kernels)
        self.attention = DecoderAttention(config, layer, weights, kernels, split)
        self.mlp_norm = RmsNorm(weights, f"{name}.post_attention_layernorm", size, epsilon, kernels)
        inner, bias, fused = config.inner_size, config.mlp_bias, config.fused
        self.mlp = GatedMlp(weights, f"{name}.mlp", size, inner, bias, kernels, split, fused)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, state: ForwardState
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.attention_norm.after_adding(hidden, residual)
        attended = self.attention(normed, state)
        normed, residual = self.mlp_norm.after_adding(attended, residual)
        return self.mlp(normed), residual


MakeLayer = Callable[[DecoderConfig, int, Weights, Kernels, Split], nn.Module]


class Decoder(Model):
    """The whole model, from token ids to logits."""

    config: DecoderConfig

    def __init__(
        self,
        files: ModelFiles,
        config: DecoderConfig,
        weights: Weights,
        kernels: Kernels,
        collectives: Collectives,
        make_layer: MakeLayer = DecoderLayer,
    ) -> None:
        super().__init__()
        self.config = config
        # First, so that what is not supported is refused before weights are read.
        self.split = split = Split.of(config, collectives)
        self.register_buffer("rotations", _rotations(files, config), persistent=False)
        shape, own = (config.vocab_size, config.hidden_size), Part(rows=(split.tokens,))
        embedding = weights.take_matrix("model.embed_tokens.weight", shape, own)
        self.embedding = VocabularyEmbedding(embedding, split)
        self.layers = nn.ModuleList(
            make_layer(config, layer, weights, kernels, split) for layer in range(config.num_layers)
        )
        epsilon, offset = config.norm_epsilon, config.norm_offset
        self.norm = RmsNorm(weights, "model.norm", config.hidden_size, epsilon, kernels, offset)
        head = embedding if config.tied else weights.take_matrix("lm_head.weight", shape, own)
        self.head = VocabularyHead(head, split, kernels)

    def embed(self, token_ids: Tensor, state: ForwardState) -> Tensor:
        hidden: Tensor = self.embedding(token_ids)
        scale = self.config.embedding_scale
        return hidden if scale is None else hidden * scale

    def body(self, hidden: Tensor, state: ForwardState) -> tuple[Tensor, ...]:
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, state)
        return (hidden,) if residual is None else (hidden, residual)

    def finish(self, *parts: Tensor) -> Tensor:
        normed, _ = self.norm.after_adding(*parts)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden).float()
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits * (1.0 / cap)) * cap


def _rotations(files: ModelFiles, config: DecoderConfig) -> Tensor:
    """The tables that the layers turn by: that of the configuration, then that of the windows."""
    positions = config.max_positions
    tables = [rope_table(files, config.head_dim, config.rotary_dim, positions)]
    if config.local_theta is not None:
        frequencies = inverse_frequencies(config.head_dim, config.local_theta)
        tables.append(rotary_table(frequencies, positions))
    return torch.stack(tables)
