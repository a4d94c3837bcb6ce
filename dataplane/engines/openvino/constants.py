"""Weights as constants of a graph: plain, or small integers that the products unpack as they go."""

import numpy as np
import openvino as ov
from openvino import Type
from openvino import opset13 as ops
from torch import Tensor

from octavo.dataplane.loading.grouped import GROUP, GroupedMatrix


def matrix_constant(weight: Tensor | GroupedMatrix) -> ov.Output:
    """A weight ``[rows, columns]`` in float32."""
    if isinstance(weight, Tensor):
        return ops.constant(weight.detach().numpy()).output(0)
    return _grouped_constant(weight)


def _grouped_constant(matrix: GroupedMatrix) -> ov.Output:
    """(integer - zero) * scale, in the form that OpenVINO recognises and keeps packed."""
    value = ops.convert(_integers(matrix), Type.f32)
    if matrix.zeros is not None:
        value = ops.subtract(value, ops.constant(matrix.zeros[..., None]))
    value = ops.multiply(value, ops.constant(matrix.scales[..., None]))
    shape = ops.constant(np.array(matrix.shape, np.int64))
    return ops.reshape(value, shape, special_zero=False).output(0)


def _integers(matrix: GroupedMatrix) -> ov.Node:
    if matrix.bits == 8:
        return ops.constant(np.ascontiguousarray(matrix.integers, np.int8))
    rows, groups = matrix.scales.shape
    packed = ov.Tensor(Type.u4, ov.Shape([rows, groups, GROUP]))
    packed.data[:] = matrix.integers.reshape(packed.data.shape)
    return ops.constant(packed)
