"""The GPT-2 family: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import optional, positive
from octavo.dataplane.models.layers import Linear
from octavo.dataplane.models.learned import (
    LayerNorm,
    LayerParts,
    LearnedConfig,
    LearnedDecoder,
    LearnedLayer,
)
from octavo.kernels.table import Kernels

# What the family's configurations may set, and the one value of each that is supported here.
_SUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def gpt2(files: ModelFiles, weights: Weights, kernels: Kernels) -> LearnedDecoder:
    """Raises ModelError for what is missing or not supported."""
    config = _read(files)
    size, name = config.hidden_size, _prefix(weights, config.hidden_size)
    embedding = weights.take_matrix(f"{name}wte.weight", (config.vocab_size, size))
    positions = weights.take(f"{name}wpe.weight", (config.max_positions, size))
    layers = [
        LearnedLayer(config, n, _parts(f"{name}h.{n}", config, weights, kernels), kernels)
        for n in range(config.num_layers)
    ]
    norm = LayerNorm(weights, f"{name}ln_f", size, config.norm_epsilon)
    return LearnedDecoder(config, embedding, positions, layers, norm, kernels)


def _read(files: ModelFiles) -> LearnedConfig:
    for key, wanted in _SUPPORTED.items():
        if files.config.get(key, wanted) != wanted:
            raise ModelError(f"{files.path}: `{key}` is supported only as {wanted}")
    hidden = positive(files, "n_embd")
    config = LearnedConfig(
        vocab_size=positive(files, "vocab_size"),
        max_positions=positive(files, "n_positions"),
        num_layers=positive(files, "n_layer"),
        hidden_size=hidden,
        inner_size=optional(files, "n_inner") or 4 * hidden,
        num_heads=positive(files, "n_head"),
        norm_epsilon=float(files.config.get("layer_norm_epsilon", 1e-5)),
        activation=files.config.get("activation_function", "gelu_new"),
    )
    config.check(files)
    return config


def _prefix(weights: Weights, size: int) -> str:
    """Of all names: the first releases have none."""
    try:
        weights.take("transformer.ln_f.weight", (size,))
    except ModelError:
        return ""
    return "transformer."


def _parts(name: str, config: LearnedConfig, weights: Weights, kernels: Kernels) -> LayerParts:
    size, inner, epsilon = config.hidden_size, config.inner_size, config.norm_epsilon

    def linear(part: str, in_size: int, out_size: int) -> Linear:
        # The files have these matrices the other way round, so no packing of their rows applies.
        weight = weights.take(f"{name}.{part}.weight", (in_size, out_size)).T
        return Linear([weight], [weights.take(f"{name}.{part}.bias", (out_size,))], kernels)

    return LayerParts(
        attention_norm=LayerNorm(weights, f"{name}.ln_1", size, epsilon),
        qkv=linear("attn.c_attn", size, 3 * size),
        out=linear("attn.c_proj", size, size),
        mlp_norm=LayerNorm(weights, f"{name}.ln_2", size, epsilon),
        up=linear("mlp.c_fc", size, inner),
        down=linear("mlp.c_proj", inner, size),
    )
