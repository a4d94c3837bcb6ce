"""Which implementation of each operation a device uses."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from octavo.kernels.cpu import kv_write as cpu_kv_write
from octavo.kernels.cpu import linear as cpu_linear
from octavo.kernels.cpu import paged_attention as cpu_paged_attention
from octavo.kernels.cpu import sampling as cpu_sampling
from octavo.kernels.cpu.rms_norm import add_rms_norm as cpu_add_rms_norm
from octavo.kernels.cpu.rms_norm import rms_norm as cpu_rms_norm
from octavo.kernels.recording import Record
from octavo.kernels.reference import block_swap, kv_write, linear, paged_attention, sampling
from octavo.kernels.reference.block_copy import block_copy
from octavo.kernels.reference.rms_norm import add_rms_norm, rms_norm
from octavo.kernels.reference.rotary import rotary, rotary_kv_write
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.reference.silu_mul import silu_mul
from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales

log = logging.getLogger(__name__)


class KernelsError(Exception):
    """Kernels that cannot run here were asked for. The text says what they need."""


class PagedAttention(Protocol):
    """`rows` is what the table's `prepare_attention` made."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        rows: Any,
        scale: float,
        form: AttentionForm = PLAIN,
        scales: KvScales | None = None,
    ) -> Tensor: ...


class KvWrite(Protocol):
    """`kv_slots` is what the table's `prepare_kv_write` made."""

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        kv_slots: Any,
        scales: KvScales | None = None,
    ) -> None: ...


class RotaryKvWrite(Protocol):
    """`kv_slots` is what the table's `prepare_kv_write` made."""

    def __call__(
        self,
        heads: Tensor,
        rotations: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        kv_slots: Any,
        scales: KvScales | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the reference of the same name says what it does.

    What a `prepare_` function works out once per forward goes to its partner in every layer.
    """

    prepare_attention: Callable[[AttentionRows, Tensor], Any]
    paged_attention: PagedAttention
    prepare_kv_write: Callable[[Tensor, Tensor], Any]
    kv_write: KvWrite
    rotary_kv_write: RotaryKvWrite
    block_copy: Callable[[Sequence[Tensor], Tensor, Tensor], None]
    block_gather: Callable[[Sequence[Tensor], Tensor], Tensor]
    block_scatter: Callable[[Tensor, Sequence[Tensor], Tensor], None]
    block_swap: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]
    prepare_linear: Callable[[Tensor], Any]  # once, when the weights are loaded
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, DrawParams], Tensor]
    log_normalizer: Callable[[Tensor], Tensor]
    top_ids: Callable[[Tensor, int], Tensor]
    record: Record | None = None  # None: these cannot


REFERENCE = Kernels(
    prepare_attention=paged_attention.prepare_attention,
    paged_attention=paged_attention.paged_attention,
    prepare_kv_write=kv_write.prepare_kv_write,
    kv_write=kv_write.kv_write,
    rotary_kv_write=rotary_kv_write,
    block_copy=block_copy,
    block_gather=block_swap.block_gather,
    block_scatter=block_swap.block_scatter,
    block_swap=block_swap.block_swap,
    prepare_linear=linear.prepare_linear,
    linear=linear.linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    rotary=rotary,
    argmax=sampling.argmax,
    sample=sampling.sample,
    log_normalizer=sampling.log_normalizer,
    top_ids=sampling.top_ids,
)

CPU = replace(
    REFERENCE,
    prepare_attention=cpu_paged_attention.prepare_attention,
    paged_attention=cpu_paged_attention.paged_attention,
    prepare_kv_write=cpu_kv_write.prepare_kv_write,
    kv_write=cpu_kv_write.kv_write,
    rotary_kv_write=cpu_kv_write.rotary_kv_write,
    prepare_linear=cpu_linear.prepare_linear,
    linear=cpu_linear.linear,
    rms_norm=cpu_rms_norm,
    add_rms_norm=cpu_add_rms_norm,
    sample=cpu_sampling.sample,
    top_ids=cpu_sampling.top_ids,
)

CHOICES = ("auto", "reference", "native", "triton")


def kernels_for(device_type: str) -> Kernels:
    """The fastest implementation of each operation that a kind of device has."""
    if device_type == "cpu":
        return native_kernels() or CPU
    return _triton() if _has_triton() else REFERENCE


@cache
def native_kernels() -> Kernels | None:
    """The operations in C; None, and a line in the log, where the extension is not there."""
    try:
        from octavo.kernels.cpu import native, recorded
    except ImportError as error:
        log.warning("no native kernels (%s): torch's operations are taken", error)
        return None
    return replace(
        CPU,
        prepare_attention=native.prepare_attention,
        paged_attention=native.paged_attention,
        prepare_kv_write=native.prepare_kv_write,
        kv_write=native.kv_write,
        rotary_kv_write=native.rotary_kv_write,
        prepare_linear=native.prepare_linear,
        linear=native.linear,
        rms_norm=native.rms_norm,
        add_rms_norm=native.add_rms_norm,
        silu_mul=native.silu_mul,
        argmax=native.argmax,
        sample=native.sample,
        record=recorded.record,
    )


def kernels_named(name: str, device_type: str) -> Kernels:
    """The table of one of CHOICES. Raises KernelsError where the device cannot run it."""
    if name == "auto":
        return kernels_for(device_type)
    if name == "reference":
        return REFERENCE
    if name == "native":
        return _native_on(device_type)
    if not _has_triton():
        raise KernelsError("the Triton kernels need the package triton, which is not installed")
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelsError(
            "on a CPU the Triton kernels run in Triton's interpreter: set TRITON_INTERPRET=1"
        )
    return _triton()


def _native_on(device_type: str) -> Kernels:
    if device_type != "cpu":
        raise KernelsError(f"the native kernels compute on CPUs, and the device is {device_type}")
    kernels = native_kernels()
    if kernels is None:
        raise KernelsError(
            "the native kernels were not built: install octavo again where there is a C compiler"
        )
    return kernels


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton() -> Kernels:
    # Only now: importing triton takes a second, and not every machine has it.
    from octavo.kernels.triton.table import TRITON

    return TRITON
