"""What launch parameters depend on: the architectures that the heuristics know."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Arch:
    """A GPU architecture as far as launch parameters depend on it."""

    name: str
    shared_memory: int  # bytes that one program may take
    warp_size: int  # threads
    wide_matrix: bool  # one instruction multiplies 64 rows, for which four warps stand together


# 163 and 227 KiB are what NVIDIA's tuning guides give a thread block; gfx942 has 64 KiB per unit.
SM_80 = Arch("sm_80", shared_memory=163 << 10, warp_size=32, wide_matrix=False)
SM_90 = Arch("sm_90", shared_memory=227 << 10, warp_size=32, wide_matrix=True)
GFX_942 = Arch("gfx942", shared_memory=64 << 10, warp_size=64, wide_matrix=False)


@cache
def arch_of(device: torch.device) -> Arch:
    """The architecture whose launch parameters a device takes: its own or the nearest below."""
    if device.type != "cuda":
        return SM_90  # the interpreter runs what the largest card runs
    if torch.version.hip is not None:
        return GFX_942
    major, _ = torch.cuda.get_device_capability(device)
    return SM_90 if major >= 9 else SM_80
