"""Where and on what a benchmark ran, and the file that keeps it together with the figures."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

_REPOSITORY = Path(__file__).resolve().parents[2]
_VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def machine() -> dict[str, Any]:
    """Cores that this process may use, CPU, memory in bytes, system."""
    model, flags = _cpu()
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": model,
        "vector_instructions": [flag for flag in _VECTOR_FLAGS if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The checkout's commit, with "+" when files differ from it; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git("status", "--porcelain") else "")


def describe(figures: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Everything that belongs beside figures when they are kept."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "config": config,
        **figures,
    }


def write_json(path: str, report: dict[str, Any]) -> None:
    """Writes the report; makes the folder if it is missing. Raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def _cpu() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor(), set()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = values.get("model name", platform.processor())
    return model, set(values.get("flags", values.get("Features", "")).split())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=_REPOSITORY,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
