"""The Gemma 3 family, text only: Gemma Team, "Gemma 3 Technical Report", 2025, section 2.

Most layers see a window and turn by a rotary base of their own; every sixth sees everything. Norms come
before and after each sub-layer.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import (
    DecoderConfig,
    Windows,
    optional,
    positive,
    windows_by_layer,
)
from octavo.dataplane.models.decoder import Decoder, DecoderAttention
from octavo.dataplane.models.layers import ForwardState, GatedMlp, RmsNorm
from octavo.dataplane.models.shard import Collectives, Split
from octavo.kernels.table import Kernels

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
_LAYERS_OF_27B = 62
_PATTERN = 6  # every how many layers one sees everything


def gemma3(files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives) -> Decoder:
    """Raises ModelError for what is missing or not supported."""
    files = _completed(files)
    _refuse_variants(files)
    config = files.config
    scalar, cap = config.get("query_pre_attn_scalar"), config.get("final_logit_softcapping")
    made = DecoderConfig.read(
        files,
        gelu=True,
        head_norms=True,
        windows=_windows(files),
        local_theta=_local_theta(files),
        score_scale=None if scalar is None else float(scalar) ** -0.5,
        embedding_scale=positive(files, "hidden_size") ** 0.5,
        logit_cap=float(cap) if cap else None,
        norm_offset=0.0 if files.format == "gguf" else 1.0,  # GGUF's converter has added it
    )
    return Decoder(files, made, weights, kernels, collectives, Gemma3Layer)


class Gemma3Layer(nn.Module):
    """Attention, then the MLP, each normalised before and after and added to what came in."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: Weights, kernels: Kernels, split: Split
    ) -> None:
        super().__init__()
        name, size = f"model.layers.{layer}", config.hidden_size

        def norm(place: str) -> RmsNorm:
            full = f"{name}.{place}_layernorm"
            return RmsNorm(weights, full, size, config.norm_epsilon, kernels, config.norm_offset)

        self.before_attention, self.after_attention = norm("input"), norm("post_attention")
        self.before_mlp, self.after_mlp = norm("pre_feedforward"), norm("post_feedforward")
        self.attention = DecoderAttention(config, layer, weights, kernels, split)
        inner = config.inner_size
        self.mlp = GatedMlp(weights, f"{name}.mlp", size, inner, False, kernels, split, gelu=True)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, state: ForwardState
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.before_attention.after_adding(hidden, residual)
        attended = self.after_attention(self.attention(normed, state))
        normed, residual = self.before_mlp.after_adding(attended, residual)
        return self.after_mlp(self.mlp(normed)), residual


def _completed(files: ModelFiles) -> ModelFiles:
    """With what the family's configurations may leave out."""
    values: dict[str, Any] = {"tie_word_embeddings": True, "rope_theta": _GLOBAL_THETA}
    if files.format == "gguf" and files.config.get("num_hidden_layers") == _LAYERS_OF_27B:
        # GGUF has no key for it, and in this size alone it is not the size of a head.
        heads = positive(files, "num_attention_heads")
        values["query_pre_attn_scalar"] = positive(files, "hidden_size") / heads
    return replace(files, config=values | files.config)


def _windows(files: ModelFiles) -> Windows:
    if files.config.get("layer_types"):
        return windows_by_layer(files)
    window = positive(files, "sliding_window")
    every = optional(files, "sliding_window_pattern") or _PATTERN
    layers = positive(files, "num_hidden_layers")
    return tuple(window if (layer + 1) % every else None for layer in range(layers))


def _local_theta(files: ModelFiles) -> float:
    own = (files.config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if own.get("rope_type", "default") != "default":
        raise ModelError(f"{files.path}: rotary scaling of layers with a window is not supported")
    return float(own.get("rope_theta") or files.config.get("rope_local_base_freq") or _LOCAL_THETA)


def _refuse_variants(files: ModelFiles) -> None:
    activation = files.config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ModelError(f"{files.path}: the activation {activation!r} is not supported here")
    for key in ("attention_bias", "use_bidirectional_attention", "attn_logit_softcapping"):
        if files.config.get(key):
            raise ModelError(f"{files.path}: `{key}` is not supported with the family Gemma 3")
