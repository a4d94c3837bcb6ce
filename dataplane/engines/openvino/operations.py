"""The kernels table with which a model builds a graph: each operation adds its nodes.

What an operation means, the reference of the same name says. They are written in the forms that
OpenVINO fuses: RMSNorm and rotary embedding become one node each.
"""

from dataclasses import dataclass, replace

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from torch import Tensor

from octavo.dataplane.engines.openvino import adapter
from octavo.dataplane.engines.openvino.adapter import RowInputs
from octavo.dataplane.engines.openvino.constants import matrix_constant
from octavo.dataplane.engines.openvino.symbols import CacheSymbol, Symbol, held, integers
from octavo.kernels.rows import PLAIN, AttentionForm
from octavo.kernels.table import REFERENCE, Kernels


@dataclass(frozen=True)
class Rotations:
    """The rotary embedding's factors of each token, ``[num_tokens, 1, head_dim]``: for both halves of
    a head the same."""

    cosines: ov.Output
    sines: ov.Output

    @classmethod
    def at(cls, table: Tensor, positions: ov.Output) -> "Rotations":
        """Of the tokens at `positions`, by the model's table of cosines and sines."""
        cosines, sines = (half.repeat(1, 2)[:, None, :] for half in table.chunk(2, dim=-1))
        return cls(*(ops.gather(held(t), positions, integers(0)).output(0) for t in (cosines, sines)))


def linear(hidden: Symbol, weight: ov.Output, bias: Tensor | None) -> Symbol:
    product = ops.matmul(hidden.value, weight, False, True)
    return Symbol(product if bias is None else ops.add(product, held(bias)))


def rms_norm(hidden: Symbol, weight: Tensor, epsilon: float) -> Symbol:
    squares = ops.power(hidden.value, _number(2.0))
    mean = ops.reduce_mean(squares, integers([-1]), keep_dims=True)
    divisor = ops.sqrt(ops.add(mean, _number(epsilon)))
    normed = ops.multiply(hidden.value, ops.divide(_number(1.0), divisor))
    return Symbol(ops.multiply(normed, held(weight)))


def add_rms_norm(
    hidden: Symbol, residual: Symbol, weight: Tensor, epsilon: float
) -> tuple[Symbol, Symbol]:
    total = hidden + residual
    return rms_norm(total, weight, epsilon), total


def silu_mul(gate_up: Symbol) -> Symbol:
    gate, up = _halves(gate_up.value, axis=1)
    return Symbol(ops.multiply(ops.swish(gate), up))


def rotary(heads: Symbol, rotations: Rotations) -> Symbol:
    first, second = _halves(heads.value, axis=2)
    turned = ops.concat([ops.multiply(second, _number(-1.0)), first], -1)
    along = ops.multiply(heads.value, rotations.cosines)
    return Symbol(ops.add(along, ops.multiply(turned, rotations.sines)))


def kv_write(
    keys: Symbol,
    values: Symbol,
    key_cache: CacheSymbol,
    value_cache: CacheSymbol,
    kv_slots: None,
    scales: None = None,
) -> None:
    """Only notes them: the attention node stores what it gets, at the places that its rows imply."""
    key_cache.new, value_cache.new = keys, values


def rotary_kv_write(
    heads: Symbol,
    rotations: Rotations,
    key_cache: CacheSymbol,
    value_cache: CacheSymbol,
    kv_slots: None,
    scales: None = None,
) -> Symbol:
    num_kv_heads = key_cache.num_heads
    rotated = rotary(heads[:, :-num_kv_heads], rotations)
    kv_write(rotated[:, -num_kv_heads:], heads[:, -num_kv_heads:], key_cache, value_cache, kv_slots)
    return rotated[:, :-num_kv_heads]


def paged_attention(
    query: Symbol,
    key_cache: CacheSymbol,
    value_cache: CacheSymbol,
    rows: RowInputs,
    scale: float,
    form: AttentionForm = PLAIN,
    scales: None = None,
) -> Symbol:
    assert form.soft_cap is None, "the attention node has no cap of scores"
    keys, values = key_cache.take_new(), value_cache.take_new()
    attended = adapter.paged_attention(
        _flat(query),
        _flat(keys),
        _flat(values),
        key_cache.value,
        value_cache.value,
        rows,
        scale,
        num_kv_heads=keys.shape[1],
        window=form.window,
    )
    return Symbol(attended).view(0, *query.shape[1:])


def _flat(heads: Symbol) -> ov.Output:
    """``[num_tokens, num_heads * head_dim]``."""
    _, num_heads, head_dim = heads.shape
    return heads.view(0, num_heads * head_dim).value


def _halves(value: ov.Output, axis: int) -> list[ov.Output]:
    half = value.get_partial_shape()[axis].get_length() // 2
    split = ops.variadic_split(value, integers(axis), integers([half, half]))
    return [split.output(0), split.output(1)]


def _number(value: float) -> ov.Node:
    return ops.constant(np.float32(value))


# The table's types speak of tensors, for which symbols stand in.
GRAPH: Kernels = replace(
    REFERENCE,
    prepare_linear=matrix_constant,
    linear=linear,  # type: ignore[arg-type]
    rms_norm=rms_norm,  # type: ignore[arg-type]
    add_rms_norm=add_rms_norm,  # type: ignore[arg-type]
    silu_mul=silu_mul,  # type: ignore[arg-type]
    rotary=rotary,  # type: ignore[arg-type]
    kv_write=kv_write,  # type: ignore[arg-type]
    rotary_kv_write=rotary_kv_write,  # type: ignore[arg-type]
    paged_attention=paged_attention,  # type: ignore[arg-type]
)
