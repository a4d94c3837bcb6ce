"""Weights from a GGUF file: dequantised tensor by tensor, or in the file's own small integers."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from octavo.common.gguf_file import GgufError, GgufTensor
from octavo.common.modelfiles import ModelError, ModelFiles, gguf_reader
from octavo.dataplane.loading.gguf_blocks import KEPT, OF_4_BITS, Bytes
from octavo.dataplane.loading.grouped import Floats, GroupedMatrix
from octavo.dataplane.loading.weights import WHOLE, Part, Ranges, check_shape

# Architectures whose files hold the rows of Q and K in the order of an interleaved rotary embedding.
_INTERLEAVED = {"llama"}


class GgufWeights:
    """The tensors of one GGUF file."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, keep_integers: bool = False) -> None:
        """
        Args:
            keep_integers: matrices of the types in `KEPT` come in the file's own integers.
        """
        self._path, self._dtype, self._keep_integers = files.path, dtype, keep_integers
        self._config = files.config
        self._file = gguf_reader(files.path)
        self._names = _name_map(files)

    def take(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        stored = self._find(name, shape)
        values = self._values(stored, part)
        heads = self._interleaved_heads(name)
        if heads is not None:
            values = values[_by_halves(len(values), heads * len(values) // shape[0])]
        return torch.tensor(values, dtype=self._dtype)

    def take_matrix(
        self, name: str, shape: tuple[int, int], part: Part = WHOLE
    ) -> Tensor | GroupedMatrix:
        stored = self._find(name, shape)
        parse = KEPT.get(stored.kind)
        if not self._keep_integers or parse is None:
            return self.take(name, shape, part)
        rows, columns = part.within(shape)
        together, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(stored.kind)]
        if not _aligned(columns, together):
            return self.take(name, shape, part)
        blocks = self._raw(stored).reshape(shape[0], -1, block_bytes)
        own = columns and tuple(range(c.start // together, c.stop // together) for c in columns)
        matrix = parse(_cut(_cut(blocks, rows, axis=0), own, axis=1))
        heads = self._interleaved_heads(name)
        if heads is None:
            return matrix
        count = matrix.shape[0]
        return matrix.rows(_by_halves(count, heads * count // shape[0]))

    def _values(self, stored: GgufTensor, part: Part) -> Floats:
        """A part of a tensor, of which no more is dequantised than its rows and the blocks of values
        in which its columns lie."""
        raw, kind = self._raw(stored), GGMLQuantizationType(stored.kind)
        if len(stored.shape) != 2:
            rows = part.within(stored.shape)[0]
            return _cut(self._dequantize(stored, raw).reshape(stored.shape), rows, axis=0)
        rows, columns = part.within(stored.shape)
        raw = _cut(raw, rows, axis=0)
        if columns is None:
            return self._dequantize(stored, raw)
        together, size = GGML_QUANT_SIZES[kind]
        parts = []
        for wanted in columns:
            first = wanted.start // together
            blocks = raw[:, first * size : -(-wanted.stop // together) * size]
            values = self._dequantize(stored, np.ascontiguousarray(blocks))
            begin = wanted.start - first * together
            parts.append(values[:, begin : begin + len(wanted)])
        return _joined(parts, axis=1)

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        own_name = self._own_name(name)
        stored = self._file.tensors.get(own_name)
        if stored is None:
            raise ModelError(f"{self._path}: tensor {own_name} ({name}) is missing")
        check_shape(f"{self._path}: tensor {own_name}", stored.shape, shape)
        return stored

    def _own_name(self, name: str) -> str:
        """``blk.0.attn_q.weight`` for ``model.layers.0.self_attn.q_proj.weight``."""
        own_name = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own_name is None:
            raise ModelError(f"{self._path}: GGUF has no name for the tensor {name}")
        return str(own_name)

    def _raw(self, stored: GgufTensor) -> Bytes:
        """The bytes of a tensor, row by row: ``[..., bytes of a row]``."""
        place = f"{self._path}: tensor {stored.name}"
        try:
            values, size = GGML_QUANT_SIZES[GGMLQuantizationType(stored.kind)]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{place} is of type {stored.kind}, which is not known") from error
        *outer, inner = stored.shape
        if inner % values:
            raise ModelError(f"{place} has rows of {inner} values, which are stored {values} together")
        rows = (*outer, inner // values * size)
        try:
            data = self._file.data(stored, int(np.prod(rows)))
        except GgufError as error:
            raise ModelError(f"{self._path}: {error}") from error
        return np.frombuffer(data, np.uint8).reshape(rows)

    def _dequantize(self, stored: GgufTensor, raw: Bytes) -> Floats:
        kind = GGMLQuantizationType(stored.kind)
        try:
            values: Floats = dequantize(raw, kind)
        except NotImplementedError as error:
            place = f"{self._path}: tensor {stored.name}"
            raise ModelError(f"{place} is quantised as {kind.name}, which is not supported") from error
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


def has_4_bit_weights(files: ModelFiles) -> bool:
    """Whether there are tensors whose 4-bit integers can be kept."""
    if files.format != "gguf":
        return False
    kinds = {tensor.kind for tensor in gguf_reader(files.path).tensors.values()}
    return not kinds.isdisjoint(OF_4_BITS)


def _name_map(files: ModelFiles) -> Any:
    family = files.config["model_type"]
    for architecture, name in gguf.MODEL_ARCH_NAMES.items():
        if name == family:
            return gguf.get_tensor_name_map(architecture, files.config["num_hidden_layers"])
    raise ModelError(f"{files.path}: the architecture {family} is not known")


def _aligned(columns: Ranges | None, together: int) -> bool:
    """Whether these are whole blocks of so many values."""
    return all(c.start % together == 0 and c.stop % together == 0 for c in columns or ())


def _cut(values: npt.NDArray[Any], ranges: Ranges | None, axis: int) -> npt.NDArray[Any]:
    """These ranges along an axis; None: everything. A single one is a view."""
    if ranges is None:
        return values
    before = (slice(None),) * axis
    return _joined([values[(*before, slice(r.start, r.stop))] for r in ranges], axis)


def _joined(parts: list[npt.NDArray[Any]], axis: int) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def _by_halves(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """The order of rows that turns pairs side by side, (0, 1), (2, 3) ..., into pairs a half head
    apart, (0, d/2), (1, d/2 + 1) ..."""
    order = np.arange(rows).reshape(heads, -1, 2)
    return order.swapaxes(1, 2).reshape(-1)
