"""Weights from a folder of safetensors files, sharded or not, memory-mapped."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import WHOLE, Part, Ranges, check_shape

_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsWeights:
    """The tensors of a Hugging Face folder."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype) -> None:
        self._folder, self._dtype = files.path, dtype
        self._open: dict[Path, Any] = {}
        self._file_of = self._indexed() or self._listed()

    def take(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"{self._folder}: no safetensors file has the tensor {name}")
        place = f"{path}: tensor {name}"
        try:
            reader = self._reader(path)
            check_shape(place, tuple(reader.get_slice(name).get_shape()), shape)
            stored = _read(reader, name, part.within(shape))
        except SafetensorError as error:
            raise ModelError(f"{place} is missing: {error}") from error
        if stored.dtype not in _DTYPES:
            raise ModelError(f"{place} is {stored.dtype}: only float32, float16 and bfloat16 are read")
        return stored.to(self._dtype)

    def take_matrix(self, name: str, shape: tuple[int, int], part: Part = WHOLE) -> Tensor:
        return self.take(name, shape, part)

    def _indexed(self) -> dict[str, Path]:
        path = self._folder / _INDEX
        if not path.exists():
            return {}
        try:
            return {
                name: self._folder / file
                for name, file in json.loads(path.read_text())["weight_map"].items()
            }
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{path} is not an index of safetensors files: {error}") from error

    def _listed(self) -> dict[str, Path]:
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{self._folder} has no *.safetensors file")
        names = {path: list(self._reader(path).keys()) for path in paths}
        return {name: path for path in paths for name in names[path]}

    def _reader(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        return self._open[path]


def _read(reader: Any, name: str, needed: list[Ranges | None]) -> Tensor:
    """A tensor, or its ranges along each dimension."""
    if not any(needed):
        whole: Tensor = reader.get_tensor(name)
        return whole
    stored = reader.get_slice(name)
    rows, *columns = [ranges or (slice(None),) for ranges in needed]

    def along_a_row(row: range | slice) -> Tensor:
        if not columns:
            return _slice_of(stored, row)
        return _joined([_slice_of(stored, row, column) for column in columns[0]], dim=1)

    return _joined([along_a_row(row) for row in rows], dim=0)


def _slice_of(stored: Any, *bounds: range | slice) -> Tensor:
    part: Tensor = stored[tuple(slice(side.start, side.stop) for side in bounds)]
    return part


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
