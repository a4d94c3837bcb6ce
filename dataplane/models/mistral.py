"""The Mistral family: Jiang et al., "Mistral 7B", 2023; in every layer the same sliding window."""

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import DecoderConfig, optional, positive
from octavo.dataplane.models.decoder import Decoder
from octavo.dataplane.models.shard import Collectives
from octavo.kernels.table import Kernels

_WINDOW = 4096  # tokens, where a configuration does not speak of it


def mistral(files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives) -> Decoder:
    """Raises ModelError for what is missing or not supported."""
    window = optional(files, "sliding_window") if "sliding_window" in files.config else _WINDOW
    windows = (window,) * positive(files, "num_hidden_layers")
    return Decoder(files, DecoderConfig.read(files, windows=windows), weights, kernels, collectives)
