"""Launch parameters of attention, from explicit rules: as large as fits registers without a spill.

The figures in the reasons are from ``python -m octavo.kernels.check``, which fails on a spill.
"""

from dataclasses import dataclass, replace
from typing import Any

from octavo.kernels.triton.arch import GFX_942, SM_80, SM_90, Arch
from octavo.kernels.triton.helpers import padded, padded_head

# tl.dot takes no fewer rows.
_FEWEST_ROWS = 16
# A head beyond this takes tiles of its own: an accumulator row is twice as long.
_COMMON_HEAD = 128
# Positions that one program of a split decode covers: the same whatever the batch, so that a row's
# result does not depend on its neighbours. With 8 KV heads it gives each of 132 processors a program
# from 8,500 tokens of context on, and the partial results are 1% of what is read.
SPLIT_TOKENS = 512


@dataclass(frozen=True)
class Tiles:
    """How a program of attention is cut."""

    rows: int  # pairs of a query and a head of the group
    keys: int  # positions per step
    num_warps: int
    num_stages: int  # steps whose loads are under way
    registers: int | None = None  # the most that a thread may take; None: the compiler decides

    def queries(self, group: int) -> int:
        """Queries that a tile holds."""
        return self.rows // group

    def options(self) -> dict[str, Any]:
        """What a launch or a compilation takes besides the kernel's own arguments."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def for_group(self, group: int) -> "Tiles":
        """With rows for all heads of a group at least."""
        return replace(self, rows=max(self.rows, padded(group)))


# Chunks, for heads of up to 128 and beyond. Each key is used by every row, so rows are what counts.
_CHUNKS = {
    # An accumulator of 128 x 128 over 8 warps is 64 registers a thread. With 64 keys, or with 64 rows
    # in 4 warps, the addresses of a step's loads no longer fit beside it: 255 registers and spills.
    SM_80.name: (Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2)),
    # wgmma reads keys and values from shared memory, which leaves registers for 64 keys (206 of 255);
    # 64 rows are the fewest that it multiplies.
    SM_90.name: (Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 2)),
    # Shared memory is 64 KiB: 32 keys of 256 take half of it.
    GFX_942.name: (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
}


def chunk_tiles(arch: Arch, group: int, head_dim: int, itemsize: int) -> Tiles:
    """For chunks.

    Args:
        itemsize: bytes of a cache's entry.
    """
    if itemsize == 4:  # NVIDIA's matrix instructions do not multiply it exactly: scalars fill registers
        return Tiles(_FEWEST_ROWS, 32, num_warps=4, num_stages=1).for_group(group)
    common, large = _CHUNKS[arch.name]
    return (common if padded_head(head_dim) <= _COMMON_HEAD else large).for_group(group)


def decode_tiles(arch: Arch, group: int, head_dim: int, itemsize: int) -> Tiles:
    """For rows of one query: as few rows as there may be, as many loads under way as fit.

    Args:
        itemsize: bytes of a cache's entry.
    """
    if itemsize == 4:
        return Tiles(_FEWEST_ROWS, 16, num_warps=4, num_stages=2).for_group(group)
    large = padded_head(head_dim) > _COMMON_HEAD
    keys = 32 if large else 64
    if itemsize == 1 or arch is GFX_942:  # widening bytes takes registers; 64 KiB hold no more
        keys //= 2
    stages = 2 if arch is GFX_942 else 3
    # Left alone, NVIDIA's assembler stops at 128 or 168 registers, for one more program on each
    # processor, and spills the last few where many are needed.
    crowded = (large or itemsize == 1) and arch is not GFX_942
    return Tiles(_FEWEST_ROWS, keys, 4, stages, 255 if crowded else None).for_group(group)
