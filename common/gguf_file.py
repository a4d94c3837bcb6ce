"""Reads GGUF files: what they say about a model, and where the bytes of each tensor lie.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32  # bytes
_MAX_DIMENSIONS = 8


class GgufError(ValueError):
    """Bytes that are no GGUF file. The text says where reading stopped."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first
    kind: int  # of its values, a `gguf.GGMLQuantizationType`
    offset: int  # of its first byte in the file


class GgufFile:
    """A memory-mapped file. Its key-values are read at once, its tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises OSError and GgufError."""
        with path.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._bytes)
        if cursor.take(4) != _MAGIC:
            raise GgufError("it does not start with GGUF")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise GgufError(f"version {version} is not supported, only {_VERSIONS} are")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.values: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.values[key] = cursor.value(cursor.scalar("I"))
        places = [cursor.tensor() for _ in range(num_tensors)]
        alignment = int(self.values.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise GgufError(f"an alignment of {alignment} makes no sense")
        self.data_offset: int = -(-cursor.position // alignment) * alignment
        self.tensors = {
            tensor.name: GgufTensor(
                tensor.name, tensor.shape, tensor.kind, self.data_offset + tensor.offset
            )
            for tensor in places
        }

    def data(self, tensor: GgufTensor, size: int) -> memoryview:
        """The `size` bytes of a tensor, not copied. Raises GgufError when the file ends before."""
        end = tensor.offset + size
        if end > len(self._bytes):
            raise GgufError(f"tensor {tensor.name} ends at byte {end} of {len(self._bytes)}")
        return memoryview(self._bytes)[tensor.offset : end]


class _Cursor:
    """Reads one thing after the other, and nothing beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.position = data, 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise GgufError(f"byte {end} is wanted of {len(self._data)}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, kind: str) -> Any:
        layout = "<" + kind
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"the string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_layout(kind))

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        layout = _layout(kind)
        return list(
            struct.unpack(f"<{count}{layout}", self.take(count * struct.calcsize("<" + layout)))
        )

    def tensor(self) -> GgufTensor:
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise GgufError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))
        return GgufTensor(name, shape[::-1], self.scalar("I"), self.scalar("Q"))


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise GgufError(f"values of type {kind} are not known")
    return _SCALARS[kind]
