"""The way of blocks between the device's pool and the swap pool in host memory.

On a GPU copies over the bus run on a stream of their own. What the device's pool gives or takes goes
through a contiguous staging buffer on the main stream, so that it happens in the order of the plans;
computing goes on while the staging buffer crosses the bus.

    main stream   gather ─┐            ┌─ scatter, rows that read the blocks
    side stream           └─ to host   from host ─┘
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from octavo.dataplane.engine import Ints
from octavo.kernels.table import Kernels


class SwapLane:
    """Owns the swap pool: ``[num_cpu_blocks, num_pools, ...]``, a block of all pools in one piece."""

    def __init__(self, pools: Sequence[Tensor], num_cpu_blocks: int, kernels: Kernels) -> None:
        """Raises RuntimeError where the memory is not there."""
        self._pools, self._kernels = pools, kernels
        first = pools[0]
        shape = (num_cpu_blocks, len(pools), *first.shape[1:])
        # Only to and from pinned memory does a copy go on without the host. Not zeroed: a block is
        # written before it is read.
        self._host = torch.empty(shape, dtype=first.dtype, pin_memory=first.is_cuda)
        self._device = first.device
        self._side: torch.cuda.Stream | None = None
        if first.is_cuda:
            self._side = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]

    def swap_out(self, pairs: Ints) -> None:
        """Copies device blocks to swap blocks; the device's may be written at once.

        Args:
            pairs: ``[device block, swap block, ...]``.
        """
        staging = self._kernels.block_gather(self._pools, self._ids(pairs[0::2]))
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            staging.record_stream(self._side)  # not given out again before the copy is done
        with self._on_side_stream():
            for row, block in enumerate(pairs[1::2].tolist()):
                self._host[block].copy_(staging[row], non_blocking=True)

    def swap_in(self, pairs: Ints) -> None:
        """Copies swap blocks to device blocks; what comes after on the main stream finds them there.

        Args:
            pairs: ``[swap block, device block, ...]``.
        """
        shape = (len(pairs) // 2, *self._host.shape[1:])
        with self._on_side_stream():
            # Allocated on this stream, so that nothing on the main stream is waited for. In the order
            # of this stream, too, what an earlier plan swapped out has arrived before.
            staging = torch.empty(shape, dtype=self._host.dtype, device=self._device)
            for row, block in enumerate(pairs[0::2].tolist()):
                staging[row].copy_(self._host[block], non_blocking=True)
        if self._side is not None:
            main = torch.cuda.current_stream(self._device)
            main.wait_stream(self._side)
            staging.record_stream(main)
        self._kernels.block_scatter(staging, self._pools, self._ids(pairs[1::2]))

    def _ids(self, blocks: Ints) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _on_side_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)
