"""Finds the reference data that is not part of the project (golden outputs, traces)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def shared(name: str) -> Path:
    """A file of the reference data; where it is not there, skips the test or the module that asks."""
    root = Path(os.environ.get("OCTAVO_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (root / name).exists():
        reason = f"reference data {name} is not at {root}: set OCTAVO_SHARED to its folder"
        pytest.skip(reason, allow_module_level=True)  # modules read it, too
    return root / name


def golden(kind: str) -> list[dict[str, Any]]:
    """The lines of golden/<kind>.jsonl."""
    return [json.loads(line) for line in shared(f"golden/{kind}.jsonl").read_text().splitlines()]
