"""How much memory this process may still take, limits of its container counted."""

import os
from pathlib import Path

from octavo.dataplane.engine import EngineError

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_memory() -> int:
    """Bytes that can be allocated without swapping or meeting a cgroup limit."""
    return min([_system(), *_cgroups()])


def require_memory(needed: int) -> None:
    """Raises EngineError where KV pools of `needed` bytes cannot be had."""
    available = available_memory()
    if needed > available:
        raise EngineError(
            f"the KV pools need {needed >> 20} MiB and {available >> 20} MiB are available: "
            "lower --num-kv-blocks, --kv-memory or --swap-memory"
        )


def _system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: ask the C library instead
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroups() -> list[int]:
    return room_in_cgroups(
        _CGROUP_V2, "memory.max", "memory.current", "inactive_file"
    ) + room_in_cgroups(
        _CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )


def room_in_cgroups(root: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Bytes left under the limit of this process's cgroup and of each one above it.

    Args:
        root: where the hierarchy is mounted.
        limit, usage: files of a cgroup.
        reclaimable: the line of its memory.stat with what the system can drop.
    """
    rooms = []
    for folder in _own_folders(root):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            rooms.append(max(0, most - used + _stat(folder / "memory.stat", reclaimable)))
    return rooms


def _own_folders(root: Path) -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    names = {line.split(":", 2)[2].strip("/") for line in lines if line.count(":") >= 2}
    paths = {root}
    for name in names:
        folder = root / name
        paths |= {folder, *folder.parents}
    return [path for path in paths if path == root or root in path.parents]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(key + " "):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
