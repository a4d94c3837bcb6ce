"""The numbers of a decoder, from the configuration that came with its weights."""

from dataclasses import dataclass
from typing import Any

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.models.rope import RopeSettings

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class DecoderConfig:
    """What the families that share Llama's shape may differ in."""

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # dimensions of a head that the rotary embedding turns
    norm_epsilon: float
    tied: bool  # whether the head shares the embedding's weights
    windows: Windows  # tokens that a query of each layer sees, itself included; None: all
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # whether each head of queries and keys is normalised
    fused: bool = False  # whether the files have QKV as one matrix, and gate and up as one
    gelu: bool = False  # whether the MLP's activation is GELU in place of silu
    norm_offset: float = 0.0  # what the files leave out of the weights of norms
    score_scale: float | None = None  # of attention; None: 1 / sqrt(head_dim)
    embedding_scale: float | None = None
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)
    local_theta: float | None = None  # base of the rotary embedding of layers with a window, if apart

    @classmethod
    def read(cls, files: ModelFiles, **family: Any) -> "DecoderConfig":
        """
        Args:
            family: fields that the family sets, in place of what the configuration says.

        Raises:
            ModelError: what is missing or not supported.
        """
        if not family.get("gelu"):
            _require_silu(files)
        heads, hidden = positive(files, "num_attention_heads"), positive(files, "hidden_size")
        layers = positive(files, "num_hidden_layers")
        head_dim = optional(files, "head_dim") or hidden // heads
        values: dict[str, Any] = {
            "vocab_size": positive(files, "vocab_size"),
            "max_positions": positive(files, "max_position_embeddings"),
            "num_layers": layers,
            "hidden_size": hidden,
            "inner_size": positive(files, "intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": optional(files, "num_key_value_heads") or heads,
            "head_dim": head_dim,
            "rotary_dim": head_dim,
            "norm_epsilon": float(files.config.get("rms_norm_eps", 1e-6)),
            "tied": bool(files.config.get("tie_word_embeddings", False)),
            "windows": (None,) * layers,
        }
        made = cls(**(values | family))
        made._check(files)
        return made

    def _check(self, files: ModelFiles) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ModelError(
                f"{files.path}: num_attention_heads is no multiple of num_key_value_heads, "
                "or head_dim is odd"
            )
        if self.rotary_dim == self.head_dim and RopeSettings(files).partial != 1.0:
            raise ModelError(
                f"{files.path}: `partial_rotary_factor` is not supported with the family "
                f"{files.config['model_type']!r}"
            )


def positive(files: ModelFiles, key: str) -> int:
    """An entry that must be there. Raises ModelError."""
    value = optional(files, key)
    if value is None:
        raise ModelError(f"{files.path}: `{key}` in the configuration is missing or not positive")
    return value


def optional(files: ModelFiles, key: str) -> int | None:
    """A positive number, or None where there is none. Raises ModelError for anything else."""
    value = files.config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{files.path}: `{key}` in the configuration is missing or not positive")
    return value


def windows_by_layer(files: ModelFiles) -> Windows:
    """Of families that mix layers with and without a window: `layer_types` of the configuration, or
    `use_sliding_window` with the first `max_window_layers` layers left out. Raises ModelError."""
    layers, window = positive(files, "num_hidden_layers"), optional(files, "sliding_window")
    types = files.config.get("layer_types")
    if not types:
        first = optional(files, "max_window_layers") or 0
        slides = window is not None and files.config.get("use_sliding_window", False)
        return tuple(window if slides and layer >= first else None for layer in range(layers))
    if len(types) != layers or not {"full_attention", "sliding_attention"}.issuperset(types):
        raise ModelError(
            f"{files.path}: `layer_types` does not name full_attention or sliding_attention for each "
            f"of {layers} layers"
        )
    if "sliding_attention" in types and window is None:
        raise ModelError(f"{files.path}: `layer_types` has sliding layers, without `sliding_window`")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _require_silu(files: ModelFiles) -> None:
    activation = files.config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{files.path}: the activation {activation!r} is not supported, only silu is")
