"""Which implementation of each operation a device uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from octavo.kernels.cpu import kv_write as cpu_kv_write
from octavo.kernels.cpu import linear as cpu_linear
from octavo.kernels.cpu import paged_attention as cpu_paged_attention
from octavo.kernels.cpu import sampling as cpu_sampling
from octavo.kernels.cpu.rms_norm import rms_norm as cpu_rms_norm
from octavo.kernels.reference import kv_write, linear, paged_attention, sampling
from octavo.kernels.reference.block_copy import block_copy
from octavo.kernels.reference.block_swap import block_swap
from octavo.kernels.reference.rms_norm import rms_norm
from octavo.kernels.reference.rotary import rotary
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.reference.silu_mul import silu_mul
from octavo.kernels.rows import AttentionRows


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the reference of the same name says what it does.

    What a `prepare_` function works out once per forward goes to its partner in every layer.
    """

    prepare_attention: Callable[[AttentionRows, Tensor], Any]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]
    prepare_kv_write: Callable[[Tensor, Tensor], Any]
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Any], None]
    block_copy: Callable[[Sequence[Tensor], Tensor, Tensor], None]
    block_swap: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]
    prepare_linear: Callable[[Tensor], Any]  # once, when the weights are loaded
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, DrawParams], Tensor]
    top_ids: Callable[[Tensor, int], Tensor]


REFERENCE = Kernels(
    prepare_attention=paged_attention.prepare_attention,
    paged_attention=paged_attention.paged_attention,
    prepare_kv_write=kv_write.prepare_kv_write,
    kv_write=kv_write.kv_write,
    block_copy=block_copy,
    block_swap=block_swap,
    prepare_linear=linear.prepare_linear,
    linear=linear.linear,
    rms_norm=rms_norm,
    silu_mul=silu_mul,
    rotary=rotary,
    sample=sampling.sample,
    top_ids=sampling.top_ids,
)

CPU = replace(
    REFERENCE,
    prepare_attention=cpu_paged_attention.prepare_attention,
    paged_attention=cpu_paged_attention.paged_attention,
    prepare_kv_write=cpu_kv_write.prepare_kv_write,
    kv_write=cpu_kv_write.kv_write,
    prepare_linear=cpu_linear.prepare_linear,
    linear=cpu_linear.linear,
    rms_norm=cpu_rms_norm,
    sample=cpu_sampling.sample,
    top_ids=cpu_sampling.top_ids,
)

_TABLE = {"cpu": CPU}


def kernels_for(device_type: str) -> Kernels:
    """The fastest implementation of each operation that a kind of device has."""
    return _TABLE.get(device_type, REFERENCE)
