"""Totals that the control plane exports."""

from dataclasses import dataclass, field

from octavo.controlplane.preemption import LOST, RECOMPUTE, SWAP


@dataclass
class Counters:
    """Totals since the process started."""

    plans: int = 0
    preemptions: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((SWAP, RECOMPUTE, LOST), 0)
    )
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_hit_tokens: int = 0
    swapped_blocks: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})
    swapped_bytes: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})
    copied_blocks: int = 0
    # Entries of block tables / blocks held, summed over plans that left some held.
    sharing_ratio_sum: float = 0.0
    sharing_ratio_count: int = 0
    lost_workers: int = 0  # dead, silent or hung
    disagreements: int = 0  # plans for which the ranks of a gang drew different tokens
    failed_suspects: int = 0  # requests that killed workers
    max_cancel_to_free_plans: int = 0
    cancels_freed: int = 0
