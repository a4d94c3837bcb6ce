"""Where a model definition gets its tensors from."""

from typing import Protocol

import torch
from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles


class Weights(Protocol):
    """The tensors of a model, under the names that Hugging Face gives them."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in the compute dtype.

        Raises:
            ModelError: it is missing or has another shape or type; names the file and the tensor.
        """


def open_weights(files: ModelFiles, dtype: torch.dtype) -> Weights:
    """The weights of a model on disk, read as they are taken. Raises ModelError."""
    if files.format == "gguf":
        from octavo.dataplane.loading.gguf import GgufWeights

        return GgufWeights(files, dtype)
    from octavo.dataplane.loading.safetensors import SafetensorsWeights

    return SafetensorsWeights(files, dtype)


def check_shape(place: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises ModelError where a tensor has not the shape that the configuration asks for."""
    if found != wanted:
        raise ModelError(f"{place} has the shape {list(found)}, the configuration wants {list(wanted)}")
