"""What is private to OpenVINO: its paged attention, in the versions that are known to have it.

`openvino.op._PagedAttentionExtension` is not part of the library's interface: its inputs and what they
mean have changed between versions. Nothing else in Octavo names it.

It stores the keys and values of all tokens before any of them is attended to, and clears what is left
of a row's last block of values. Per layer it takes two caches, inputs of the model, in blocks of 32
tokens.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import Type
from openvino import opset13 as ops

from octavo.dataplane.engine import EngineError

BLOCK_SIZE = 32  # tokens
KNOWN_VERSIONS = ("2026.4.1",)

# With 8-bit caches the scale and zero point (two float32) lie beside the data: for each channel of a
# block of keys, and for each token's value vector.
_SCALE_BYTES = 8


class UnusableError(EngineError):
    """This OpenVINO cannot be used. The text says why."""


@dataclass(frozen=True)
class KvFormat:
    """How the caches store numbers."""

    element: npt.DTypeLike
    packed_scales: bool
    hint: str  # as OpenVINO calls it

    def key_shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Of one block of keys."""
        extra = _SCALE_BYTES if self.packed_scales else 0
        return num_kv_heads, BLOCK_SIZE + extra, head_dim

    def value_shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Of one block of values."""
        extra = _SCALE_BYTES if self.packed_scales else 0
        return num_kv_heads, BLOCK_SIZE, head_dim + extra


KV_FORMATS = {
    "float32": KvFormat(np.float32, False, "f32"),
    "float16": KvFormat(np.float16, False, "f16"),
    "uint8": KvFormat(np.uint8, True, "u8"),
}


@dataclass(frozen=True)
class RowInputs:
    """The rows of a forward, as inputs of a model under construction; all int32."""

    context_lens: ov.Output  # [num_rows]
    query_begins: ov.Output  # [num_rows + 1]
    block_indices: ov.Output  # [sum of table lengths]
    block_begins: ov.Output  # [num_rows + 1]
    longest: ov.Output  # [], of context and queries together

    @classmethod
    def make(cls) -> "RowInputs":
        return cls(*(_row_input(field.name) for field in fields(cls)))

    def all(self) -> list[ov.Output]:
        """In the order of the fields."""
        return list(vars(self).values())


def _row_input(name: str) -> ov.Output:
    return ops.parameter([] if name == "longest" else [-1], Type.i32, name=name).output(0)


def require_usable() -> None:
    """Raises UnusableError where the paged attention that this file knows is not there."""
    version = ov.__version__.split("-")[0]
    if version not in KNOWN_VERSIONS:
        raise UnusableError(
            f"OpenVINO {version} is installed, and its paged attention is known only of "
            f"{', '.join(KNOWN_VERSIONS)}"
        )
    try:
        _probe()
    except Exception as error:  # the library raises many kinds
        first_line = str(error).strip().splitlines()[0]
        raise UnusableError(f"OpenVINO's paged attention is not as expected: {first_line}") from error


def _probe() -> None:
    """Makes one node: its constructor checks the number, types and ranks of its inputs."""
    query, keys, values = (ops.parameter([-1, 32], Type.f32).output(0) for _ in range(3))
    paged_attention(query, keys, values, cache_input(), cache_input(), RowInputs.make(), 1.0, 1)


def cache_input() -> ov.Output:
    """An input for the keys or values of one layer; compilation gives it its type."""
    return ops.parameter([-1, -1, -1, -1], Type.dynamic).output(0)


def paged_attention(
    query: ov.Output,
    keys: ov.Output,
    values: ov.Output,
    key_cache: ov.Output,
    value_cache: ov.Output,
    rows: RowInputs,
    scale: float,
    num_kv_heads: int,
    window: int | None = None,
) -> ov.Output:
    """Stores keys and values of new tokens, then attends.

    Args:
        query: ``[num_tokens, num_heads * head_dim]``.
        keys, values: ``[num_tokens, num_kv_heads * head_dim]``.
        key_cache, value_cache: from `cache_input`.
        window: tokens that a query sees, itself included; None: all up to its own.

    Returns:
        ``[num_tokens, num_heads * head_dim]``.
    """
    inputs = [query, keys, values, key_cache, value_cache]
    inputs += [rows.context_lens, rows.query_begins, rows.block_indices, rows.block_begins]
    inputs += [_constant(scale, np.float32), _constant(window or 0, np.int32)]  # 0: no window
    inputs += [_empty(np.float32)]  # ALiBi slopes
    inputs += [rows.longest]
    inputs += [_empty(np.int32)]  # score aggregation window
    inputs += [_empty(np.int32), _empty(np.int32), _empty(np.float32)]  # rotation of cached blocks
    inputs += [_empty(np.float32), _constant(0, np.int32), _constant(0, np.int32)]  # XAttention
    inputs += [_empty(np.float32, 0, 0, 0, 0)]  # sinks
    inputs += [_constant(0, np.int32), *(_empty(np.int32) for _ in range(3))]  # adaptive eviction
    inputs += [_empty(np.int32), _empty(np.uint8), _empty(np.int32)]  # token types, query-query bias
    node: Any = _operation()(inputs)
    sizes = node.get_rt_info()
    sizes["num_k_heads"] = sizes["num_v_heads"] = num_kv_heads
    head_dim = keys.get_partial_shape()[1].get_length() // num_kv_heads
    sizes["k_head_size"] = sizes["v_head_size"] = head_dim
    return node.output(0)


def _operation() -> Any:
    from openvino.op import _PagedAttentionExtension

    return _PagedAttentionExtension


def _constant(value: float, dtype: npt.DTypeLike) -> ov.Output:
    return ops.constant(np.array(value, dtype)).output(0)


def _empty(dtype: npt.DTypeLike, *shape: int) -> ov.Output:
    return ops.constant(np.zeros(shape or (0,), dtype)).output(0)


def compile_model(
    model: ov.Model, kv_format: KvFormat, threads: int, round_activations: bool
) -> ov.CompiledModel:
    """For CPUs, in float32 throughout but for what is asked for.

    Args:
        round_activations: what meets small integers is rounded to int8, each group of 32 of a row by
            itself, so that a row does not depend on its neighbours.

    Raises:
        UnusableError: this CPU or this version cannot run the graph.
    """
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": "NO",  # two workers of a machine would be pinned to the same cores
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": kv_format.hint,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if round_activations else "0",
    }
    try:
        return ov.Core().compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise UnusableError(f"OpenVINO cannot compile the model: {error}") from error
