"""The narrow interface between the worker and what computes: one forward over paged memory."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


class EngineError(Exception):
    """An engine cannot run here. The text says what to do."""


@dataclass(frozen=True)
class EngineInfo:
    """What a worker announces of its engine."""

    device: str  # "cpu", "cuda:0"
    engine: str  # "torch", "openvino"
    block_sizes: tuple[int, ...]  # tokens; the supported sizes, empty for any
    preferred_block_size: int
    token_bytes: int  # of KV cache per token, all layers, this rank's heads
    weight_bytes: int  # of the weights that this rank holds


@dataclass(frozen=True)
class Batch:
    """The rows of one forward, prefill chunks and decodes mixed, as flat int32 arrays.

    Row s computes the tokens ``query_begins[s] .. query_begins[s+1]``; its block table is
    ``block_indices[block_begins[s] : block_begins[s+1]]``, and `context_lens[s]` of its tokens were
    computed before.
    """

    token_ids: Ints  # [num_tokens]
    positions: Ints  # [num_tokens]
    kv_slots: Ints  # [num_tokens], block id * block_size + offset; negative: not stored
    query_begins: Ints  # [num_rows + 1]
    context_lens: Ints  # [num_rows]
    block_indices: Ints  # [sum of table lengths]
    block_begins: Ints  # [num_rows + 1]
    logit_tokens: Ints  # [num_logits], indices of the tokens whose logits are wanted
    # Tokens that only the device knows: `late_values`, on the device, belong at these indices of
    # `token_ids`. Only for engines that overlap.
    late_tokens: Ints | None = None
    late_values: Tensor | None = None


class Engine(Protocol):
    """A model on a device with its KV pools. Used by one thread."""

    @property
    def overlaps(self) -> bool:
        """Whether its methods return before the device is done, so that the next plan can be handed
        over meanwhile."""

    def describe(self) -> EngineInfo:
        """What this engine is; needs no pools."""

    def make_pools(self, num_blocks: int, block_size: int, num_cpu_blocks: int) -> None:
        """Makes the device pool and the swap pool in place of those there are.

        Raises:
            EngineError: the memory is not there, or the block size is not supported.
        """

    def warm_up(self, num_slots: int) -> None:
        """Does once, before plans come, what would delay them; needs pools.

        Args:
            num_slots: no plan has more rows.
        """

    def synchronize(self) -> None:
        """Waits until the device has done all that it was handed."""

    def forward(self, batch: Batch) -> Tensor:
        """Runs the model and stores keys and values of all rows before any row reads them.

        Returns:
            ``[num_logits, hidden_size]``, the final hidden states at `logit_tokens`, for `logits`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]`` in float32 for some rows of what `forward` gave.

        Apart from `forward` so that the logits of a long prompt can be taken in slices.
        """

    def copy_blocks(self, pairs: Ints) -> None:
        """Copies device blocks, ``[source, destination, ...]``, sources first, in all layers."""

    def swap_out(self, pairs: Ints) -> None:
        """Copies device blocks to the swap pool: ``[device block, cpu block, ...]``."""

    def swap_in(self, pairs: Ints) -> None:
        """Copies swapped blocks to the device pool: ``[cpu block, device block, ...]``."""
