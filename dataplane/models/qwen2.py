"""The Qwen2 family: Yang et al., "Qwen2 Technical Report", 2024; biases on queries, keys and values."""

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import DecoderConfig, windows_by_layer
from octavo.dataplane.models.decoder import Decoder
from octavo.dataplane.models.shard import Collectives
from octavo.kernels.table import Kernels


def qwen2(files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives) -> Decoder:
    """Raises ModelError for what is missing or not supported."""
    config = DecoderConfig.read(files, qkv_bias=True, windows=windows_by_layer(files))
    return Decoder(files, config, weights, kernels, collectives)
