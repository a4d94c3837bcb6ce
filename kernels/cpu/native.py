"""The operations of a forward in C, for float32 on CPUs; other types fall back to torch's.

The extension `_native` holds each operation for AVX-512, for AVX2 and for any processor, and takes the
best that it finds. Its threads are its own: torch should have one beside them. What an operation cannot
take (another type, an fp8 cache, a layout with gaps) goes to torch, as the modules beside it use that.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.cpu import _native
from octavo.kernels.cpu import kv_write as torch_kv_write
from octavo.kernels.cpu import linear as torch_linear
from octavo.kernels.cpu import paged_attention as torch_attention
from octavo.kernels.cpu import rms_norm as torch_rms_norm
from octavo.kernels.cpu import sampling as torch_sampling
from octavo.kernels.cpu.recorded import invoke
from octavo.kernels.reference import sampling as reference_sampling
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.reference.silu_mul import silu_mul as torch_silu_mul
from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales

_MAX_HEAD_DIM = 512  # as fill_panels in csrc/prefill_attention.h has it


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[out_size, in_size]`` in panels of columns, as the extension reads it."""

    panels: Tensor  # [ceil(out_size / PANEL), in_size, PANEL]
    address: int
    out_size: int
    in_size: int


class IntegerMatrix(Protocol):
    """A weight ``[out_size, groups * 32]`` with value = (integer - zero) * scale."""

    @property
    def bits(self) -> int:
        """4 or 8."""

    @property
    def integers(self) -> npt.NDArray[Any]:
        """``[out_size, groups, 4 * bits]`` of 8 bits; of 4, two neighbours in each, the first lower."""

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        """``[out_size, groups]``."""

    @property
    def zeros(self) -> npt.NDArray[np.float32] | None:
        """``[out_size, groups]``; None: all are 0."""


@dataclass(frozen=True)
class PackedIntegers:
    """An `IntegerMatrix` in panels of columns."""

    panels: Tensor  # bytes
    address: int
    bits: int
    out_size: int
    groups: int
    activation_bits: int  # what it is multiplied with: 32 as it comes, 16 or 8 rounded first


def _pack_integers(weight: IntegerMatrix, activation_bits: int) -> PackedIntegers:
    out_size, groups = weight.scales.shape
    size = _native.GROUP_BYTES_4 if weight.bits == 4 else _native.GROUP_BYTES_8
    panels = torch.empty(-(-out_size // _native.PANEL) * groups * size, dtype=torch.uint8)
    integers, scales = np.ascontiguousarray(weight.integers), np.ascontiguousarray(weight.scales)
    zeros = None if weight.zeros is None else np.ascontiguousarray(weight.zeros)
    _native.pack_grouped(
        integers.ctypes.data,
        weight.bits,
        scales.ctypes.data,
        0 if zeros is None else zeros.ctypes.data,
        out_size,
        groups,
        panels.data_ptr(),
    )
    return PackedIntegers(panels, panels.data_ptr(), weight.bits, out_size, groups, activation_bits)


def prepare_linear(weight: Tensor | IntegerMatrix, activation_bits: int = 32) -> Any:
    """The weight packed, or as torch wants it where it is of another type than float32.

    Args:
        activation_bits: what integers are multiplied with: 32 is the input itself; 16 or 8 rounds each
            group of 32 of a row to integers first, by its largest magnitude.
    """
    if not isinstance(weight, Tensor):
        return _pack_integers(weight, activation_bits)
    if weight.dtype is not torch.float32 or weight.device.type != "cpu" or not weight.numel():
        return torch_linear.prepare_linear(weight)
    out_size, in_size = weight.shape
    weight = weight.detach().contiguous()
    panels = torch.empty(-(-out_size // _native.PANEL), in_size, _native.PANEL)
    _native.pack(weight.data_ptr(), out_size, in_size, panels.data_ptr())
    return PackedWeight(panels, panels.data_ptr(), out_size, in_size)


def linear(hidden: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias`` with a weight from `prepare_linear`; hidden is ``[n, in_size]``."""
    if type(weight) is PackedIntegers:
        return _linear_of_integers(hidden.contiguous(), weight, bias)
    if type(weight) is not PackedWeight:
        return torch_linear.linear(hidden, weight, bias)
    hidden = hidden.contiguous()
    rows, in_size = hidden.shape
    if in_size != weight.in_size or hidden.dtype is not torch.float32:
        raise ValueError(f"a product of {in_size} {hidden.dtype} with {weight.in_size} float32 columns")
    output = torch.empty(rows, weight.out_size)
    added = 0 if bias is None else bias.data_ptr()
    invoke(
        (hidden, weight, bias, output),
        _native.linear,
        hidden.data_ptr(),
        rows,
        in_size,
        weight.out_size,
        weight.address,
        added,
        output.data_ptr(),
    )
    return output


def _linear_of_integers(hidden: Tensor, weight: PackedIntegers, bias: Tensor | None) -> Tensor:
    rows, in_size = hidden.shape
    if in_size != weight.groups * 32 or hidden.dtype is not torch.float32:
        raise ValueError(f"a product of {in_size} {hidden.dtype} with {weight.groups * 32} columns")
    output = torch.empty(rows, weight.out_size)
    added = 0 if bias is None else bias.data_ptr()
    invoke(
        (hidden, weight, bias, output),
        _native.linear_grouped,
        hidden.data_ptr(),
        rows,
        weight.groups,
        weight.out_size,
        weight.bits,
        weight.address,
        added,
        output.data_ptr(),
        weight.activation_bits,
    )
    return output


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same as the reference's."""
    if hidden.dtype is not torch.float32 or not hidden.is_contiguous():
        return torch_rms_norm.rms_norm(hidden, weight, epsilon)
    rows, size = hidden.shape
    normed = torch.empty(rows, size)
    held = (hidden, weight, normed)
    addresses = (hidden.data_ptr(), 0, weight.data_ptr())
    invoke(held, _native.norm, *addresses, rows, size, epsilon, normed.data_ptr(), 0)
    return normed


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The same as the reference's."""
    if hidden.dtype is not torch.float32 or not (hidden.is_contiguous() and residual.is_contiguous()):
        return torch_rms_norm.add_rms_norm(hidden, residual, weight, epsilon)
    rows, size = hidden.shape
    normed, total = torch.empty(rows, size), torch.empty(rows, size)
    invoke(
        (hidden, residual, weight, normed, total),
        _native.norm,
        hidden.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        rows,
        size,
        epsilon,
        normed.data_ptr(),
        total.data_ptr(),
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """The same as the reference's."""
    if gate_up.dtype is not torch.float32 or not gate_up.is_contiguous():
        return torch_silu_mul(gate_up)
    rows, both = gate_up.shape
    output = torch.empty(rows, both // 2)
    invoke((gate_up, output), _native.gate, gate_up.data_ptr(), rows, both // 2, output.data_ptr())
    return output


@dataclass(frozen=True)
class PreparedSlots:
    """Where tokens go, for the extension and, once it is asked for, for torch."""

    slots: Tensor  # [num_tokens] int64
    address: int
    like: Tensor  # a cache

    @cached_property
    def for_torch(self) -> torch_kv_write.PreparedSlots:
        return torch_kv_write.prepare_kv_write(self.slots, self.like)


def prepare_kv_write(kv_slots: Tensor, key_cache: Tensor) -> PreparedSlots:
    """Checks the slots against caches of the shape of `key_cache`. Raises IndexError."""
    slots = kv_slots.long().contiguous()
    if len(slots) and int(slots.max()) >= key_cache.shape[0] * key_cache.shape[2]:
        raise IndexError(f"KV slot {int(slots.max())} in a cache of {key_cache.shape[0]} blocks")
    return PreparedSlots(slots, slots.data_ptr(), key_cache)


def kv_write(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: PreparedSlots,
    scales: KvScales | None = None,
) -> None:
    """The same as the reference's, for slots that `prepare_kv_write` has checked."""
    torch_kv_write.kv_write(keys, values, key_cache, value_cache, kv_slots.for_torch, scales)


def rotary_kv_write(
    heads: Tensor,
    rotations: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: PreparedSlots,
    scales: KvScales | None = None,
) -> Tensor:
    """The same as the reference's, for slots that `prepare_kv_write` has checked."""
    if not _can_take(heads, key_cache, value_cache, scales) or rotations.dtype is not torch.float32:
        return torch_kv_write.rotary_kv_write(
            heads, rotations, key_cache, value_cache, kv_slots.for_torch, scales
        )
    tokens, all_heads, head_dim = heads.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    query = torch.empty(tokens, all_heads - 2 * num_kv_heads, head_dim)
    rotations = rotations.contiguous()
    invoke(
        (heads, rotations, key_cache, value_cache, query),
        _native.rotary,
        heads.data_ptr(),
        tokens,
        all_heads - 2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        block_size,
        rotations.data_ptr(),
        kv_slots.address,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        query.data_ptr(),
    )
    return query


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a forward, for the extension and, once it is asked for, for torch."""

    rows: AttentionRows  # int64
    count: int
    addresses: tuple[int, int, int, int]  # of the four arrays of `rows`
    like: Tensor  # a cache

    @cached_property
    def for_torch(self) -> torch_attention.PreparedRows:
        return torch_attention.prepare_attention(self.rows, self.like)


def prepare_attention(rows: AttentionRows, key_cache: Tensor) -> PreparedRows:
    """Checks the rows against caches of the shape of `key_cache`. Raises IndexError."""
    arrays = [
        array.long().contiguous()
        for array in (rows.query_begins, rows.context_lens, rows.block_indices, rows.block_begins)
    ]
    begins, contexts, blocks, tables = arrays
    count, (num_blocks, _, block_size, _) = len(contexts), key_cache.shape
    if not len(begins) == len(tables) == count + 1:
        raise ValueError(f"{len(begins)} and {len(tables)} borders of {count} rows")
    first, second, third, fourth = (array.data_ptr() for array in arrays)
    addresses = (first, second, third, fourth)
    fault = _native.fault_of_rows(*addresses, count, len(blocks), num_blocks, block_size)
    if fault == 1:
        raise IndexError(f"a block table names a block that a cache of {num_blocks} does not have")
    if fault == 2:
        raise IndexError("a block table is too short for its row")
    return PreparedRows(AttentionRows(begins, contexts, blocks, tables), count, addresses, key_cache)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PreparedRows,
    scale: float,
    form: AttentionForm = PLAIN,
    scales: KvScales | None = None,
) -> Tensor:
    """The same as the reference's, for rows that `prepare_attention` has checked."""
    tokens, num_heads, head_dim = query.shape
    if not _can_take(query, key_cache, value_cache, scales) or head_dim > _MAX_HEAD_DIM or scale <= 0:
        return torch_attention.paged_attention(
            query, key_cache, value_cache, rows.for_torch, scale, form, scales
        )
    _, num_kv_heads, block_size, _ = key_cache.shape
    output = torch.empty(tokens, num_heads, head_dim)
    invoke(
        (query, key_cache, value_cache, output),
        _native.attention,
        query.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        rows.count,
        *rows.addresses,
        scale,
        form.window or 0,
        form.soft_cap or 0.0,
        output.data_ptr(),
    )
    return output


def argmax(logits: Tensor) -> Tensor:
    """The same as the reference's."""
    if logits.dtype is not torch.float32 or not logits.is_contiguous() or not logits.numel():
        return reference_sampling.argmax(logits)
    rows, size = logits.shape
    places = torch.empty(rows, dtype=torch.int64)
    _native.argmax(logits.data_ptr(), rows, size, places.data_ptr())
    return places


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """The same as the reference's."""
    return torch_sampling.sample(logits, params, argmax, _draw_unlimited)


def _draw_unlimited(logits: Tensor, params: DrawParams) -> Tensor:
    """A token of each row's whole distribution."""
    if logits.dtype is not torch.float32 or not logits.numel():
        return torch_sampling.draw_unlimited(logits, params)
    logits, temperatures = logits.contiguous(), params.temperature.float().contiguous()
    keys = [values.long().contiguous() for values in (params.seeds, params.positions, params.samples)]
    rows, size = logits.shape
    places = torch.empty(rows, dtype=torch.int64)
    addresses = [values.data_ptr() for values in (temperatures, *keys, places)]
    _native.gumbel(logits.data_ptr(), rows, size, *addresses)
    return places


def _can_take(given: Tensor, key_cache: Tensor, value_cache: Tensor, scales: KvScales | None) -> bool:
    return (
        scales is None
        and given.dtype is torch.float32
        and key_cache.dtype is torch.float32
        and value_cache.dtype is torch.float32
        and given.is_contiguous()
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
    )
