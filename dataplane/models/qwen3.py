"""The Qwen3 family: Yang et al., "Qwen3 Technical Report", 2025; normalised queries and keys."""

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import DecoderConfig, windows_by_layer
from octavo.dataplane.models.decoder import Decoder
from octavo.dataplane.models.shard import Collectives
from octavo.kernels.table import Kernels


def qwen3(files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives) -> Decoder:
    """Raises ModelError for what is missing or not supported."""
    attention_bias = bool(files.config.get("attention_bias", False))
    config = DecoderConfig.read(
        files,
        head_norms=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        windows=windows_by_layer(files),
    )
    return Decoder(files, config, weights, kernels, collectives)
