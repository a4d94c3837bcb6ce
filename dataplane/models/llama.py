"""The Llama family: Touvron et al., "LLaMA", 2023, section 2.2, with grouped-query attention."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.layers import (
    Embedding,
    ForwardState,
    GatedMlp,
    Linear,
    RmsNorm,
    RotaryAttention,
)
from octavo.kernels.reference.rotary import rotary_table
from octavo.kernels.table import Kernels


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of a Llama model, from the configuration that came with its weights."""

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool  # whether the head shares the embedding's weights

    @classmethod
    def read(cls, files: ModelFiles) -> "LlamaConfig":
        """Raises ModelError for what is missing or not supported."""
        _refuse_variants(files)
        config = files.config
        heads = _positive(files, "num_attention_heads")
        hidden = _positive(files, "hidden_size")
        made = cls(
            vocab_size=_positive(files, "vocab_size"),
            max_positions=_positive(files, "max_position_embeddings"),
            num_layers=_positive(files, "num_hidden_layers"),
            hidden_size=hidden,
            inner_size=_positive(files, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(_rope(config).get("rope_theta", 10000.0)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        if made.num_heads % made.num_kv_heads or made.head_dim % 2:
            raise ModelError(
                f"{files.path}: num_attention_heads, num_key_value_heads or head_dim is odd"
            )
        return made


def _positive(files: ModelFiles, key: str) -> int:
    value = files.config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{files.path}: `{key}` in the configuration is missing or not positive")
    return value


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings, which newer configurations keep in a dictionary of their own."""
    own = {key: config[key] for key in ("rope_theta",) if key in config}
    return own | (config.get("rope_parameters") or config.get("rope_scaling") or {})


def _refuse_variants(files: ModelFiles) -> None:
    rope = _rope(files.config)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    scaling = files.gguf.get("llama.rope.scaling.type", scaling)
    if scaling not in ("default", "none"):
        raise ModelError(f"{files.path}: rotary scaling of type {scaling!r} is not supported yet")
    activation = files.config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{files.path}: the activation {activation!r} is not supported, only silu is")


class LlamaAttention(nn.Module):
    """Projections and rotary embedding around paged attention."""

    def __init__(self, config: LlamaConfig, layer: int, weights: Weights, kernels: Kernels) -> None:
        super().__init__()
        name = f"model.layers.{layer}.self_attn"
        self._head_dim = config.head_dim
        query_size, kv_size = config.num_heads * self._head_dim, config.num_kv_heads * self._head_dim
        projections = [f"{name}.{part}_proj" for part in "qkv"]
        sizes = [query_size, kv_size, kv_size]
        size, bias = config.hidden_size, config.attention_bias
        self.qkv = Linear.take(weights, projections, size, sizes, bias, kernels)
        self.out = Linear.take(weights, [f"{name}.o_proj"], query_size, [size], bias, kernels)
        self.attend = RotaryAttention(layer, self._head_dim, kernels)

    def forward(self, hidden: Tensor, state: ForwardState) -> Tensor:
        heads = self.qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        out: Tensor = self.out(self.attend(heads, state).reshape(hidden.shape[0], -1))
        return out


class LlamaLayer(nn.Module):
    """Attention, then the MLP, each normalised before and added to what came in."""

    def __init__(self, config: LlamaConfig, layer: int, weights: Weights, kernels: Kernels) -> None:
        super().__init__()
        name, size, epsilon = f"model.layers.{layer}", config.hidden_size, config.norm_epsilon
        self.attention_norm = RmsNorm(weights, f"{name}.input_layernorm", size, epsilon, kernels)
        self.attention = LlamaAttention(config, layer, weights, kernels)
        self.mlp_norm = RmsNorm(weights, f"{name}.post_attention_layernorm", size, epsilon, kernels)
        self.mlp = GatedMlp(weights, f"{name}.mlp", size, config.inner_size, config.mlp_bias, kernels)

    def forward(self, hidden: Tensor, state: ForwardState) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), state)
        normed, hidden = self.mlp_norm.after_adding(attended, hidden)
        added: Tensor = hidden + self.mlp(normed)
        return added


class Llama(nn.Module):
    """The whole model, from token ids to logits."""

    rotations: Tensor

    def __init__(self, files: ModelFiles, weights: Weights, kernels: Kernels) -> None:
        super().__init__()
        config = LlamaConfig.read(files)
        size, vocab_size = config.hidden_size, config.vocab_size
        self.config = config
        embedding = weights.take_matrix("model.embed_tokens.weight", (vocab_size, size))
        self.embedding = Embedding(embedding)
        self.layers = nn.ModuleList(
            LlamaLayer(config, layer, weights, kernels) for layer in range(config.num_layers)
        )
        self.norm = RmsNorm(weights, "model.norm", size, config.norm_epsilon, kernels)
        head = embedding if config.tied else weights.take_matrix("lm_head.weight", (vocab_size, size))
        self.head = Linear([head], [], kernels)
        table = rotary_table(config.head_dim, config.max_positions, config.rope_theta)
        self.register_buffer("rotations", table, persistent=False)

    def forward(self, token_ids: Tensor, state: ForwardState, logit_tokens: Tensor) -> Tensor:
        """The final hidden states at `logit_tokens`: ``[num_logits, hidden_size]``."""
        hidden = self.embedding(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, state)
        normed: Tensor = self.norm(hidden[logit_tokens])
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]`` in float32."""
        logits: Tensor = self.head(hidden)
        return logits.float()
