"""The Phi-3 family: Abdin et al., "Phi-3 Technical Report", 2024; fused projections, and in some models
only a part of each head turns."""

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.config import DecoderConfig, optional, positive
from octavo.dataplane.models.decoder import Decoder
from octavo.dataplane.models.rope import RopeSettings
from octavo.dataplane.models.shard import Collectives
from octavo.kernels.table import Kernels


def phi3(files: ModelFiles, weights: Weights, kernels: Kernels, collectives: Collectives) -> Decoder:
    """Raises ModelError for what is missing or not supported."""
    windows = (optional(files, "sliding_window"),) * positive(files, "num_hidden_layers")
    rotary_dim = _rotary_dim(files)
    config = DecoderConfig.read(files, fused=True, windows=windows, rotary_dim=rotary_dim)
    return Decoder(files, config, weights, kernels, collectives)


def _rotary_dim(files: ModelFiles) -> int:
    heads, hidden = positive(files, "num_attention_heads"), positive(files, "hidden_size")
    head_dim = optional(files, "head_dim") or hidden // heads
    own = files.gguf.get("phi3.rope.dimension_count")
    rotary_dim = int(head_dim * RopeSettings(files).partial) if own is None else int(own)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"{files.path}: `partial_rotary_factor` makes {rotary_dim} of {head_dim} dimensions turn: "
            "it must be an even number of them"
        )
    return rotary_dim
