"""The blocks of GGUF's integer types, whose values a `GroupedMatrix` can hold as they are.

The layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. All but the
types of k-quants have blocks of one group; theirs have eight (`_SUPER`).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from octavo.dataplane.loading.grouped import Floats, GroupedMatrix, pack_nibbles

Bytes = npt.NDArray[np.uint8]
_SUPER = 8  # groups in a block of k-quants


def _q4_0(blocks: Bytes) -> GroupedMatrix:
    scales, integers = _halves(blocks, 0), pack_nibbles(_nibbles(blocks[..., 2:]))
    return GroupedMatrix(4, integers, scales, np.full_like(scales, 8))


def _q4_1(blocks: Bytes) -> GroupedMatrix:
    return _affine(4, _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Bytes) -> GroupedMatrix:
    integers = _with_fifth_bits(blocks[..., 6:], blocks[..., 2:6])
    return GroupedMatrix(8, integers.astype(np.int8) - np.int8(16), _halves(blocks, 0), None)


def _q5_1(blocks: Bytes) -> GroupedMatrix:
    integers = _with_fifth_bits(blocks[..., 8:], blocks[..., 4:8])
    return _affine(8, integers, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Bytes) -> GroupedMatrix:
    integers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return GroupedMatrix(8, integers, _halves(blocks, 0), None)


def _q4_k(blocks: Bytes) -> GroupedMatrix:
    return _affine(4, _nibbles_of_groups(blocks[..., 16:]), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> GroupedMatrix:
    """Bit i of byte j of the first 32 is the fifth bit of value j of group i."""
    fifth = blocks[..., 16:48, None] >> np.arange(_SUPER, dtype=np.uint8) & np.uint8(1)
    fifth = fifth.swapaxes(-1, -2).reshape(blocks.shape[0], -1, fifth.shape[-2])
    integers = _nibbles_of_groups(blocks[..., 48:]) | fifth << np.uint8(4)
    return _affine(8, integers, *_scales_and_minima(blocks))


KEPT: dict[int, Callable[[Bytes], GroupedMatrix]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
}  # from blocks [rows, blocks of a row, bytes of a block]
OF_4_BITS = frozenset((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K))


def _affine(bits: int, integers: Bytes, scales: Floats, minima: Floats) -> GroupedMatrix:
    """integer * scale + minimum = (integer - zero) * scale, with a zero that is no integer.

    A scale of 0 leaves the minimum alone, which then becomes the scale of integer 0 less zero -1.

    Args:
        integers: ``[rows, groups, GROUP]``, not packed.
    """
    flat = scales == 0
    integers = np.where(flat[..., None], np.uint8(0), integers)
    zeros = np.where(flat, np.float32(-1), -minima / np.where(flat, np.float32(1), scales))
    kept = pack_nibbles(integers) if bits == 4 else integers.astype(np.int8)
    return GroupedMatrix(bits, kept, np.where(flat, minima, scales), zeros)


def _halves(blocks: Bytes, offset: int) -> Floats:
    """The float16 at a byte of each block."""
    two_bytes = np.ascontiguousarray(blocks[..., offset : offset + 2])
    return two_bytes.view("<f2")[..., 0].astype(np.float32)


def _nibbles(stored: Bytes) -> Bytes:
    """The values of bytes where byte i holds the i-th of the first half, and of the second."""
    return np.concatenate((stored & np.uint8(15), stored >> np.uint8(4)), axis=-1)


def _with_fifth_bits(stored: Bytes, bits: Bytes) -> Bytes:
    """The nibbles of a group, each with its bit of 32 on top."""
    fifth = np.unpackbits(np.ascontiguousarray(bits), axis=-1, bitorder="little")
    return _nibbles(stored) | fifth << np.uint8(4)


def _nibbles_of_groups(stored: Bytes) -> Bytes:
    """``[rows, groups, GROUP]`` from blocks in which two groups share 32 bytes."""
    rows, blocks, _ = stored.shape
    return _nibbles(stored.reshape(rows, blocks, _SUPER // 2, -1)).reshape(rows, blocks * _SUPER, -1)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """What to multiply the integers of each group by, and then to add: ``[rows, groups]``.

    They are products of a float16 of the block and six bits of the group, which lie so in 12 bytes:

        bytes 0-3    scale of group i in the lower six bits, top two bits of the scale of i + 4
        bytes 4-7    the same of the minima
        bytes 8-11   lower four bits of the scale of i + 4, lower four bits of its minimum
    """
    first, second, last = np.split(blocks[..., 4:16], 3, axis=-1)
    low, high = np.uint8(63), np.uint8(0x30)
    scales = np.concatenate((first & low, last & np.uint8(15) | first >> np.uint8(2) & high), axis=-1)
    minima = np.concatenate((second & low, last >> np.uint8(4) | second >> np.uint8(2) & high), axis=-1)
    rows = len(blocks)
    return (
        (_halves(blocks, 0)[..., None] * scales).reshape(rows, -1),
        (-_halves(blocks, 2)[..., None] * minima).reshape(rows, -1),
    )
