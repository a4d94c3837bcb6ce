"""Weight matrices in small integers, with a scale for every group of 32 along a row."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix ``[rows, groups * GROUP]`` with value = (integer - zero) * scale.

    The integers are int8 ``[rows, groups, GROUP]``, or of 4 bits without sign in uint8
    ``[rows, groups, GROUP / 2]``, where each byte holds two neighbours, the first in its lower half.
    """

    bits: int  # 4 or 8
    integers: npt.NDArray[Any]
    scales: Floats  # [rows, groups]
    zeros: Floats | None  # [rows, groups]; None: all are 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, groups = self.scales.shape
        return rows, groups * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.integers.nbytes + self.scales.nbytes + zeros

    def rows(self, order: npt.NDArray[np.int64]) -> "GroupedMatrix":
        """The rows in another order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, integers=self.integers[order], scales=self.scales[order], zeros=zeros)

    def values(self) -> Floats:
        """The matrix in float32."""
        kept = self.integers if self.bits == 8 else unpack_nibbles(self.integers)
        shifted = kept.astype(np.float32)
        if self.zeros is not None:
            shifted -= self.zeros[..., None]
        shifted *= self.scales[..., None]
        return shifted.reshape(self.shape)


def join(parts: list[GroupedMatrix]) -> GroupedMatrix | None:
    """The matrices below one another; None where they are not of one kind."""
    first = parts[0]
    if any((p.bits, p.zeros is None) != (first.bits, first.zeros is None) for p in parts):
        return None
    return GroupedMatrix(
        bits=first.bits,
        integers=np.concatenate([part.integers for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zeros=None
        if first.zeros is None
        else np.concatenate([part.zeros for part in parts if part.zeros is not None]),
    )


def round_to_int8(values: Floats) -> GroupedMatrix:
    """The nearest int8 values, each group scaled so that its largest magnitude is 127.

    Args:
        values: ``[rows, columns]``, columns a multiple of GROUP.
    """
    groups = values.reshape(values.shape[0], -1, GROUP)
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    divisors = np.where(scales == 0, np.float32(1), scales)
    integers = np.rint(groups / divisors[..., None]).astype(np.int8)
    return GroupedMatrix(bits=8, integers=integers, scales=scales, zeros=None)


def pack_nibbles(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two of ``[..., n]`` values below 16 in each byte: ``[..., n / 2]``."""
    return integers[..., 0::2] | (integers[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The inverse of `pack_nibbles`."""
    return np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1).reshape(
        *packed.shape[:-1], -1
    )
