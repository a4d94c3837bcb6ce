"""The GPT-2 family: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Part, Ranges, Weights
from octavo.dataplane.models.config import optional, positive
from octavo.dataplane.models.layers import Linear, RowParallel
from octavo.dataplane.models.learned import (
    LayerNorm,
    LayerParts,
    LearnedConfig,
    LearnedDecoder,
    LearnedLayer,
)
from octavo.dataplane.models.shard import Collectives, Split
from octavo.kernels.table import Kernels

# What the family's configurations may set, and the one value of each that is supported here.
_SUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def gpt2(
    files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives
) -> LearnedDecoder:
    """Raises ModelError for what is missing or not supported."""
    config = _read(files)
    split = Split.of(config, collectives)
    size, name = config.hidden_size, _prefix(weights, config.hidden_size)
    shape, own = (config.vocab_size, size), Part(rows=(split.tokens,))
    embedding = weights.take_matrix(f"{name}wte.weight", shape, own)
    positions = weights.take(f"{name}wpe.weight", (config.max_positions, size))
    layers = [
        LearnedLayer(config, n, _parts(f"{name}h.{n}", config, weights, kernels, split), kernels, split)
        for n in range(config.num_layers)
    ]
    norm = LayerNorm(weights, f"{name}ln_f", size, config.norm_epsilon)
    return LearnedDecoder(config, embedding, positions, layers, norm, kernels, split)


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


def _parts(
    name: str, config: LearnedConfig, weights: Weights, kernels: Kernels, split: Split
) -> LayerParts:
    size, inner, epsilon = config.hidden_size, config.inner_size, config.norm_epsilon
    attended = split.attended
    thirds = tuple(split.rows_of(split.heads, part * size) for part in range(3))

    def taken(part: str, in_size: int, out_size: int, own: Part) -> Tensor:
        # The files have these matrices the other way round, so no packing of their rows applies.
        return weights.take(f"{name}.{part}.weight", (in_size, out_size), own.turned()).T

    def into(part: str, out_size: int, own: Ranges) -> Linear:
        rows = Part(rows=own)
        bias = weights.take(f"{name}.{part}.bias", (out_size,), rows)
        return Linear([taken(part, size, out_size, rows)], [bias], kernels)

    def out_of(part: str, in_size: int, own: range) -> RowParallel:
        weight = taken(part, in_size, size, Part(columns=(own,)))
        return RowParallel(weight, weights.take(f"{name}.{part}.bias", (size,)), split, kernels)

    return LayerParts(
        attention_norm=LayerNorm(weights, f"{name}.ln_1", size, epsilon),
        qkv=into("attn.c_attn", 3 * size, thirds),
        out=out_of("attn.c_proj", size, attended),
        mlp_norm=LayerNorm(weights, f"{name}.ln_2", size, epsilon),
        up=into("mlp.c_fc", inner, (split.inner,)),
        down=out_of("mlp.c_proj", inner, split.inner),
    )
