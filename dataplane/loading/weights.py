"""Where a model definition gets its tensors from."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.grouped import GROUP, GroupedMatrix, round_to_int8

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Part:
    """The rows and columns of a tensor to read; None: all. Nothing else is read, nor kept."""

    rows: Ranges | None = None
    columns: Ranges | None = None

    def within(self, shape: tuple[int, ...]) -> list[Ranges | None]:
        """What to read along each dimension, neighbouring ranges as one; None: all of it."""
        sides = [self.rows, self.columns][: len(shape)]
        return [_needed(side, size) for side, size in zip(sides, shape, strict=False)]

    def turned(self) -> "Part":
        """The same of the transposed tensor."""
        return Part(rows=self.columns, columns=self.rows)


def _needed(ranges: Ranges | None, size: int) -> Ranges | None:
    if ranges is None:
        return None
    merged: list[range] = []
    for part in ranges:
        if merged and merged[-1].stop == part.start:
            merged[-1] = range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return None if merged == [range(size)] else tuple(merged)


WHOLE = Part()


class Weights(Protocol):
    """The tensors of a model, under the names that Hugging Face gives them."""

    def take(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        """One tensor in the compute dtype, or a part of it.

        Args:
            shape: of the whole tensor.

        Raises:
            ModelError: it is missing or has another shape or type; names the file and the tensor.
        """

    def take_matrix(
        self, name: str, shape: tuple[int, int], part: Part = WHOLE
    ) -> Tensor | GroupedMatrix:
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

    def take(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        return self._weights.take(name, shape, part)

    def take_matrix(
        self, name: str, shape: tuple[int, int], part: Part = WHOLE
    ) -> Tensor | GroupedMatrix:
        values = self._weights.take(name, shape, part)
        if values.shape[1] % GROUP:
            return values
        return round_to_int8(values.float().numpy())


def check_shape(place: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises ModelError where a tensor has not the shape that the configuration asks for."""
    if found != wanted:
        raise ModelError(f"{place} has the shape {list(found)}, the configuration wants {list(wanted)}")
