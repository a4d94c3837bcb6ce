"""Where a model definition gets its tensors from."""

from typing import Protocol

import torch
from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.grouped import GROUP, GroupedMatrix, round_to_int8


class Weights(Protocol):
    """The tensors of a model, under the names that Hugging Face gives them."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in the compute dtype.

        Raises:
            ModelError: it is missing or has another shape or type; names the file and the tensor.
        """

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | GroupedMatrix:
        """The weight of a matrix product or an embedding, as `take` gives it or in small integers."""


def open_weights(files: ModelFiles, dtype: torch.dtype, packing: str = "none") -> Weights:
    """The weights of a model on disk, read as they are taken.

    Args:
        packing: of matrices: ``none`` for the compute dtype, ``int8`` rounds to int8 in groups of 32,
            ``exact4`` keeps the integers of a GGUF file where it has them in such groups.

    Raises:
        ModelError: the files cannot be read.
    """
    weights = _open(files, dtype, keep_integers=packing == "exact4")
    return RoundedWeights(weights) if packing == "int8" else weights


def _open(files: ModelFiles, dtype: torch.dtype, keep_integers: bool) -> Weights:
    if files.format == "gguf":
        from octavo.dataplane.loading.gguf import GgufWeights

        return GgufWeights(files, dtype, keep_integers)
    from octavo.dataplane.loading.safetensors import SafetensorsWeights

    return SafetensorsWeights(files, dtype)


class RoundedWeights:
    """Matrices of other weights rounded to int8, where their rows are whole groups."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._weights.take(name, shape)

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | GroupedMatrix:
        values = self._weights.take(name, shape)
        if shape[1] % GROUP:
            return values
        return round_to_int8(values.float().numpy())


def check_shape(place: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises ModelError where a tensor has not the shape that the configuration asks for."""
    if found != wanted:
        raise ModelError(f"{place} has the shape {list(found)}, the configuration wants {list(wanted)}")
