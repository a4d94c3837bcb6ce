"""What kernels share: finding work, reading and writing the paged cache, softmax, padding."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.rows import KvScales

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# An e4m3 number's bits in the place of a float16's stand for 2^-8 of it: the exponents' biases differ.
FP8_UNIT = tl.constexpr(256.0)
FP8_LARGEST = tl.constexpr(448.0)


def padded(size: int) -> int:
    """The next power of two: the only sizes that tiles have."""
    return int(triton.next_power_of_2(size))


def padded_head(head_dim: int) -> int:
    """The size of a head in a tile that is multiplied: tl.dot sums over 16 entries at least."""
    return max(16, padded(head_dim))


def check_inner(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous")


def check_scales(cache: Tensor, scales: KvScales | None) -> None:
    """Raises ValueError for an fp8 cache without scales, or another one with some."""
    if (cache.dtype is torch.float8_e4m3fn) != (scales is not None):
        raise ValueError("an fp8 cache needs scales, and no other cache has any")


def bytes_if_fp8(cache: Tensor) -> Tensor:
    """Kernels read and write the bits of e4m3 themselves: not every card converts it."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def warps_for(entries: int) -> int:
    """Warps for a pass over so many entries: a thread takes eight of them, 16 bytes, at a time."""
    return min(8, max(1, padded(entries) // (32 * 8)))


# -- finding work -----------------------------------------------------------------------------------
#
# Rows are cut into items of SIZE, and a launch has ``total // SIZE + num_rows`` programs, which needs
# no look at the rows. Row r's items begin at ``begins[r] * UNIT // SIZE + r``; with SIZE = 4:
#
#     begins   0     5        6  12        rows of 5, 1 and 6
#     items    0 1   2(none)  3  4 5       row 1 begins at 5 // 4 + 1 = 2, row 2 at 6 // 4 + 2 = 3


@triton.jit
def first_item(begins, row, UNIT: tl.constexpr, SIZE: tl.constexpr):
    return (tl.load(begins + row) * UNIT // SIZE).to(tl.int32) + row


@triton.jit
def row_of_item(begins, num_rows, item, UNIT: tl.constexpr, SIZE: tl.constexpr):
    """The last row whose items begin at or before `item`, by bisection."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if first_item(begins, middle, UNIT, SIZE) <= item:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


# -- the paged cache ---------------------------------------------------------------------------------


@triton.jit
def load_cached(pointers, mask, dtype: tl.constexpr):
    """Loads entries in `dtype`; those of a byte are e4m3 and come in units of 1 / FP8_UNIT."""
    loaded = tl.load(pointers, mask=mask, other=0.0)
    if pointers.dtype.element_ty == tl.uint8:
        bits = loaded.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(dtype)
    return loaded.to(dtype)


@triton.jit
def store_cached(pointers, values, mask):
    """Stores entries in the cache's type; where it is a byte, as e4m3, rounded to the nearest even."""
    if pointers.dtype.element_ty == tl.uint8:
        tl.store(pointers, to_e4m3(values.to(tl.float32)), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def to_e4m3(values):
    """The bits of the nearest e4m3 numbers to float32 values; too large ones saturate."""
    magnitude = tl.minimum(tl.abs(values), FP8_LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # Half of what is cut off rounds up, exactly half only to an even result; the bias is 7, not 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9; adding 2^23 leaves no room for a fraction, so it rounds.
    steps = (magnitude * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, steps, normal)
    sign = (values.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


# -- softmax ------------------------------------------------------------------------------------------


@triton.jit
def finite_or_zero(maxima):
    """What to subtract in an exponent: where everything is masked, not -inf from -inf."""
    return tl.where(maxima == float("-inf"), 0.0, maxima)


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """``CAP * tanh(scores / CAP)``; the exponential may overflow, which gives +-CAP."""
    return CAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / CAP)) + 1.0))
