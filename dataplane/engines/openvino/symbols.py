"""Stand-ins for tensors with which a model's `forward` builds a graph instead of computing.

A model definition calls operations of its kernels table and a few methods of tensors. `Symbol` has
those methods, and each adds a node to the graph; `operations` has the table.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from torch import Tensor
from torch.nn import functional as F

from octavo.dataplane.engines.openvino.constants import matrix_constant

_Number = float  # in `Symbol` that name is a method's
_TO_THE_END = 2**31 - 1


class Symbol:
    """A value of the graph, with the methods of a tensor that models use."""

    def __init__(self, value: ov.Output | ov.Node) -> None:
        self.value: ov.Output = value.output(0) if isinstance(value, ov.Node) else value

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, 0 where one is not known yet; `view` reads a 0 as "as it was"."""
        dimensions = self.value.get_partial_shape()
        return tuple(size.get_length() if size.is_static else 0 for size in dimensions)

    def view(self, *sizes: int) -> "Symbol":
        """With other sizes: 0 keeps the size of that dimension, -1 takes what is left."""
        return Symbol(ops.reshape(self.value, integers(sizes), special_zero=True))

    reshape = view

    def float(self) -> "Symbol":
        """The graph is in float32 throughout."""
        return self

    def __add__(self, other: "Symbol") -> "Symbol":
        return Symbol(ops.add(self.value, other.value))

    def __mul__(self, other: "Symbol | _Number") -> "Symbol":
        factor = other.value if isinstance(other, Symbol) else ops.constant(np.float32(other))
        return Symbol(ops.multiply(self.value, factor))

    def __getitem__(self, key: "Symbol | slice | tuple[slice, ...]") -> "Symbol":
        """Rows by their indices, or slices without steps of the first dimensions."""
        if isinstance(key, Symbol):
            return Symbol(ops.gather(self.value, key.value, integers(0)))
        part = self
        for axis, bounds in enumerate(key if isinstance(key, tuple) else (key,)):
            if bounds != slice(None):
                part = part._slice(axis, bounds)
        return part

    def _slice(self, axis: int, bounds: slice) -> "Symbol":
        start = 0 if bounds.start is None else bounds.start
        stop = _TO_THE_END if bounds.stop is None else bounds.stop
        places = (integers([number]) for number in (start, stop, 1, axis))
        return Symbol(ops.slice(self.value, *places))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "Symbol":
        """Functions of torch that models call."""
        if function is F.embedding:
            token_ids, weight = args
            return Symbol(ops.gather(matrix_constant(weight), token_ids.value, integers(0)))
        given = kwargs or {}
        if function is torch.cat:
            return Symbol(ops.concat([part.value for part in args[0]], given["dim"]))
        if function is F.gelu:
            return Symbol(ops.gelu(args[0].value, given.get("approximate", "erf")))
        if function is F.relu:
            return Symbol(ops.relu(args[0].value))
        if function is F.layer_norm:
            return _layer_norm(args[0], given["weight"], given["bias"], given["eps"])
        if function is torch.tanh:
            return Symbol(ops.tanh(args[0].value))
        raise NotImplementedError(f"{function} has no node in a graph of OpenVINO")


def _layer_norm(hidden: Symbol, weight: Tensor, bias: Tensor, epsilon: float) -> Symbol:
    normed = ops.mvn(hidden.value, integers([-1]), True, epsilon, "inside_sqrt")
    return Symbol(ops.add(ops.multiply(normed, held(weight)), held(bias)))


class CacheSymbol:
    """The cache of one layer's keys or values, and what is to be stored in it."""

    def __init__(self, value: ov.Output, num_heads: int) -> None:
        self.value, self.num_heads = value, num_heads
        self.new: Symbol | None = None

    def take_new(self) -> Symbol:
        """What was to be stored."""
        assert self.new is not None, "attention comes after the write"
        new, self.new = self.new, None
        return new


def integers(values: int | Sequence[int]) -> ov.Node:
    """A constant."""
    return ops.constant(np.array(values, np.int64))


def held(tensor: Tensor) -> ov.Node:
    """A constant with the values of a tensor."""
    return ops.constant(tensor.detach().numpy())
