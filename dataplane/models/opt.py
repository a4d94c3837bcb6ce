"""The OPT family: Zhang et al., "OPT: Open Pre-trained Transformer Language Models", 2022."""

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Part, Ranges, Weights
from octavo.dataplane.models.config import positive
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

_EPSILON = 1e-5
_FIRST_POSITION = 2  # the files have two rows before that of position 0
# What the family's configurations may set, and the one value of each that is supported here.
_SUPPORTED = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}


def opt(
    files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives
) -> LearnedDecoder:
    """Raises ModelError for what is missing or not supported."""
    config = _read(files)
    split = Split.of(config, collectives)
    size, name = config.hidden_size, "model.decoder"
    shape, own = (config.vocab_size, size), Part(rows=(split.tokens,))
    embedding = weights.take_matrix(f"{name}.embed_tokens.weight", shape, own)
    stored = config.max_positions + _FIRST_POSITION
    positions = weights.take(f"{name}.embed_positions.weight", (stored, size))[_FIRST_POSITION:]
    layers = [
        LearnedLayer(
            config, n, _parts(f"{name}.layers.{n}", config, weights, kernels, split), kernels, split
        )
        for n in range(config.num_layers)
    ]
    norm = LayerNorm(weights, f"{name}.final_layer_norm", size, _EPSILON)
    return LearnedDecoder(config, embedding, positions, layers, norm, kernels, split)


def _read(files: ModelFiles) -> LearnedConfig:
    for key, wanted in _SUPPORTED.items():
        if files.config.get(key, wanted) != wanted:
            raise ModelError(f"{files.path}: `{key}` is supported only as {wanted}")
    hidden = positive(files, "hidden_size")
    if files.config.get("word_embed_proj_dim", hidden) != hidden:
        raise ModelError(f"{files.path}: `word_embed_proj_dim` is supported only as hidden_size")
    config = LearnedConfig(
        vocab_size=positive(files, "vocab_size"),
        max_positions=positive(files, "max_position_embeddings"),
        num_layers=positive(files, "num_hidden_layers"),
        hidden_size=hidden,
        inner_size=positive(files, "ffn_dim"),
        num_heads=positive(files, "num_attention_heads"),
        norm_epsilon=_EPSILON,
        activation=files.config.get("activation_function", "relu"),
    )
    config.check(files)
    return config


def _parts(
    name: str, config: LearnedConfig, weights: Weights, kernels: Kernels, split: Split
) -> LayerParts:
    size, inner, attention = config.hidden_size, config.inner_size, f"{name}.self_attn"

    def into(names: list[str], out_size: int, own: range) -> Linear:
        rows: list[Ranges] = [(own,)] * len(names)
        sizes = [out_size] * len(names)
        return Linear.take(weights, names, size, sizes, True, kernels, rows=rows)

    def out_of(part: str, in_size: int, own: range) -> RowParallel:
        return RowParallel.take(weights, part, (size, in_size), own, True, split, kernels)

    return LayerParts(
        attention_norm=LayerNorm(weights, f"{name}.self_attn_layer_norm", size, _EPSILON),
        qkv=into([f"{attention}.{part}_proj" for part in "qkv"], size, split.attended),
        out=out_of(f"{attention}.out_proj", size, split.attended),
        mlp_norm=LayerNorm(weights, f"{name}.final_layer_norm", size, _EPSILON),
        up=into([f"{name}.fc1"], inner, split.inner),
        down=out_of(f"{name}.fc2", inner, split.inner),
    )
