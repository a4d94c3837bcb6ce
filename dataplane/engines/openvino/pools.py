"""KV blocks of the OpenVINO engine: arrays that the library reads and writes in place."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.dataplane.engine import Ints

Blocks = npt.NDArray[Any]


@dataclass(frozen=True)
class Pools:
    """Keys and values of all layers, each ``[num_layers, num_blocks, *shape of a block]``."""

    keys: Blocks
    values: Blocks

    @classmethod
    def make(
        cls,
        num_layers: int,
        num_blocks: int,
        key_shape: tuple[int, ...],
        value_shape: tuple[int, ...],
        element: npt.DTypeLike,
    ) -> "Pools":
        """Raises MemoryError. The memory is not touched: the system commits it as it is written."""
        keys, values = (
            np.empty((num_layers, num_blocks, *shape), element) for shape in (key_shape, value_shape)
        )
        return cls(keys, values)

    def copy(self, pairs: Ints) -> None:
        """Copies blocks, ``[source, destination, ...]``: all sources are read before any write."""
        sources, destinations = pairs[0::2], pairs[1::2]
        for blocks in (self.keys, self.values):
            blocks[:, destinations] = blocks[:, sources]

    def copy_from(self, other: "Pools", pairs: Ints) -> None:
        """Copies blocks of another pool, ``[its block, own block, ...]``."""
        for source, destination in pairs.reshape(-1, 2).tolist():
            self.keys[:, destination] = other.keys[:, source]
            self.values[:, destination] = other.values[:, source]
