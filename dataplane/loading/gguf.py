"""Weights from a GGUF file: dequantised tensor by tensor, straight into the compute dtype."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles, gguf_reader
from octavo.dataplane.loading.weights import check_shape

# Architectures whose files hold the rows of Q and K in the order of an interleaved rotary embedding.
_INTERLEAVED = {"llama"}


class GgufWeights:
    """The tensors of one GGUF file."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype) -> None:
        self._path, self._dtype = files.path, dtype
        self._config = files.config
        self._tensors = {tensor.name: tensor for tensor in gguf_reader(files.path).tensors}
        self._names = _name_map(files)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        own_name = self._own_name(name)
        place = f"{self._path}: tensor {own_name}"
        stored = self._tensors.get(own_name)
        if stored is None:
            raise ModelError(f"{place} ({name}) is missing")
        check_shape(place, tuple(int(size) for size in reversed(stored.shape)), shape)
        values = self._dequantize(place, stored).reshape(shape)
        heads = self._interleaved_heads(name)
        if heads is not None:
            values = _by_halves(values, heads)
        return torch.tensor(values, dtype=self._dtype)

    def _own_name(self, name: str) -> str:
        """``blk.0.attn_q.weight`` for ``model.layers.0.self_attn.q_proj.weight``."""
        own_name = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own_name is None:
            raise ModelError(f"{self._path}: GGUF has no name for the tensor {name}")
        return str(own_name)

    def _dequantize(self, place: str, stored: Any) -> npt.NDArray[np.float32]:
        try:
            values: npt.NDArray[np.float32] = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            kind = stored.tensor_type.name
            raise ModelError(f"{place} is quantised as {kind}, which is not supported") from error
        return values

    def _interleaved_heads(self, name: str) -> int | None:
        if self._config["model_type"] not in _INTERLEAVED:
            return None
        if ".q_proj." in name:
            return int(self._config["num_attention_heads"])
        if ".k_proj." in name:
            heads = self._config.get("num_key_value_heads", self._config["num_attention_heads"])
            return int(heads)
        return None


def _name_map(files: ModelFiles) -> Any:
    family = files.config["model_type"]
    for architecture, name in gguf.MODEL_ARCH_NAMES.items():
        if name == family:
            return gguf.get_tensor_name_map(architecture, files.config["num_hidden_layers"])
    raise ModelError(f"{files.path}: the architecture {family} is not known")


def _by_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """From pairs side by side, (0, 1), (2, 3) ..., to pairs a half head apart, (0, d/2), ..."""
    paired = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return paired.swapaxes(1, 2).reshape(values.shape)
