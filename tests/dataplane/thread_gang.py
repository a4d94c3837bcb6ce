"""The ranks of a gang as threads of one process, which hand tensors over by reference."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.models.shard import Shard

T = TypeVar("T")


class ThreadCollectives:
    """Implements `octavo.dataplane.models.shard.Collectives`."""

    def __init__(self, rank: int, table: list[Tensor], barrier: threading.Barrier) -> None:
        self.shard = Shard(rank, len(table))
        self._table, self._barrier = table, barrier

    def _parts(self, part: Tensor) -> list[Tensor]:
        self._table[self.shard.rank] = part
        self._barrier.wait(60)
        parts = list(self._table)
        self._barrier.wait(60)  # before anybody writes again
        return parts

    def all_reduce(self, part: Tensor) -> Tensor:
        return torch.stack(self._parts(part)).sum(dim=0)

    def all_gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        parts = self._parts(part)
        assert [one.shape[1] for one in parts] == sizes
        return torch.cat(parts, dim=1)


class ThreadGang:
    """An engine for each rank."""

    def __init__(self, files: ModelFiles, size: int) -> None:
        table, barrier = [torch.empty(0)] * size, threading.Barrier(size)
        self.engines = [
            TorchEngine(files, "cpu", "float32", collectives=ThreadCollectives(rank, table, barrier))
            for rank in range(size)
        ]

    def run(self, call: Callable[[TorchEngine], T]) -> list[T]:
        """What the call gives on each rank."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(call, self.engines))
