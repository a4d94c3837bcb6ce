"""Copies from the device to the host that need not be waited for."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class HostCopy:
    """Tensors on their way to the host; on CPUs they are there already."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            # Only into pinned memory does a copy go on without the host.
            buffers = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
            tensors = buffers
        self._tensors = tensors

    def wait(self) -> list[Array]:
        """The values, once they are all there."""
        if self._event is not None:
            self._event.synchronize()
        return [np.asarray(tensor.numpy()) for tensor in self._tensors]
