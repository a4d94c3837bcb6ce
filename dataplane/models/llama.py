"""The Llama family: Touvron et al., "LLaMA", 2023; the decoder as it is, with biases where it says."""

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import DecoderConfig
from octavo.dataplane.models.decoder import Decoder
from octavo.dataplane.models.shard import Collectives
from octavo.kernels.table import Kernels


def llama(files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives) -> Decoder:
    """Raises ModelError for what is missing or not supported."""
    attention_bias = bool(files.config.get("attention_bias", False))
    config = DecoderConfig.read(
        files,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(files.config.get("mlp_bias", False)),
    )
    return Decoder(files, config, weights, kernels, collectives)
