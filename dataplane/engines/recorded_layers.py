"""The layers of a forward as one call, on CPUs: what CUDA graphs do for GPUs, for batches of any size.

They are recorded once there are pools. Then they are rehearsed: what they return and store must have
the bits of the operations called one by one, or those stay.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octavo.dataplane.engine import Batch
from octavo.dataplane.engines.decode_graphs import rows_in_one_block
from octavo.dataplane.models.layers import ForwardState
from octavo.kernels.recording import Brought, Record, Recorded, RecordingError

log = logging.getLogger(__name__)

Layers = Callable[[Tensor, ForwardState], tuple[Tensor, ...]]
Prepare = Callable[[Batch], tuple[Tensor, ForwardState]]

# Rows of the rehearsals, by contexts and queries. The first is recorded.
_ROWS = (([3, 0], [1, 6]), ([0, 2, 5], [1, 1, 1]))
_MOST_TOKENS = 7


class RecordedLayers:
    """A model's layers over one set of pools."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def __call__(self, hidden: Tensor, state: ForwardState) -> tuple[Tensor, ...]:
        return self._recorded.run(_brought(hidden, state))


def record_layers(layers: Layers, record: Record, prepare: Prepare, pool: Tensor) -> Layers:
    """The layers recorded; where that cannot be, as they are. Overwrites the pools' first blocks.

    Args:
        prepare: from a batch to what the layers take; always with the same pools.
        pool: one of them.
    """
    num_blocks, _, block_size, _ = pool.shape
    given = [prepare(batch) for batch in _rehearsals(num_blocks * block_size, block_size)]
    hidden, state = given[0]
    try:
        recorded = record(lambda: layers(hidden, state), _brought(hidden, state))
    except RecordingError as reason:
        log.debug("layers run operation by operation: %s", reason)
        return layers
    candidate = RecordedLayers(recorded)
    for hidden, state in given:
        wanted, found = (_effects(one, hidden, state) for one in (layers, candidate))
        if not all(map(torch.equal, wanted, found)):
            log.warning("layers run operation by operation: recorded they computed something else")
            return layers
    log.info("recorded the layers: all of a forward are one call")
    return candidate


def _brought(hidden: Tensor, state: ForwardState) -> Brought:
    return Brought(hidden.contiguous(), state.rotations, state.rows, state.kv_slots)


def _effects(layers: Layers, hidden: Tensor, state: ForwardState) -> list[Tensor]:
    """The bits of what the layers return, and of what they store in blocks that were zeros."""
    blocks = -(-_MOST_TOKENS // state.key_caches[0].shape[2])
    stored = [cache[:blocks].zero_() for cache in (*state.key_caches, *state.value_caches)]
    results = layers(hidden, state)
    return [part.clone().view(torch.int32) for part in (*results, *stored)]


def _rehearsals(num_slots: int, block_size: int) -> Iterator[Batch]:
    """Batches of chunks and decodes that store each token in a slot of its own, where there is one."""
    for contexts, counts in _ROWS:
        batch = rows_in_one_block(contexts, counts, block_size)
        slots = np.arange(sum(counts), dtype=np.int32)
        yield replace(batch, kv_slots=np.where(slots < num_slots, slots, np.int32(-1)))
