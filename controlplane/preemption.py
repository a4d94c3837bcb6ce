"""By which way a group gives up its blocks: what swapping costs against what recomputing costs."""

from dataclasses import dataclass

from octavo.controlplane.block_manager import BlockManager
from octavo.controlplane.sequence import SequenceGroup

SWAP, RECOMPUTE, AUTO = "swap", "recompute", "auto"
MODES = (SWAP, RECOMPUTE, AUTO)
LOST = "lost"  # what a group whose worker went away has suffered
_MEMORY = 0.1  # weight of the newest measurement


@dataclass
class Speeds:
    """What the worker measured; 0 where it has not."""

    copy: float = 0.0  # blocks per second between the pools, one way
    prefill: float = 0.0  # tokens per second

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Takes in a plan that computed prompt tokens."""
        if tokens and seconds > 0:
            speed = tokens / seconds
            self.prefill = self.prefill + _MEMORY * (speed - self.prefill) if self.prefill else speed


def choose(mode: str, group: SequenceGroup, blocks: BlockManager, speeds: Speeds) -> str:
    """SWAP or RECOMPUTE for this running group, none of whose plans is in flight.

    A group that still prefills is recomputed: what it has is little, and it comes back in one piece.
    """
    slots = [sequence.slot for sequence in group.live if sequence.slot is not None]
    if mode == RECOMPUTE or group.is_prefilling or not blocks.can_swap_out(slots):
        return RECOMPUTE
    if mode == SWAP:
        return SWAP
    distinct = blocks.num_distinct(slots)
    if not speeds.copy or not speeds.prefill:
        return RECOMPUTE
    swap_seconds = 2 * distinct / speeds.copy
    # Shared blocks are recomputed once, so the distinct blocks say how many tokens there are.
    recompute_seconds = distinct * blocks.block_size / speeds.prefill
    return SWAP if swap_seconds < recompute_seconds else RECOMPUTE
