"""Finds the reference data that is not part of the project (golden outputs, traces)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def shared(name: str) -> Path:
    """The file `name` of the reference data; skips the test when the data is not there."""
    root = Path(os.environ.get("OCTAVO_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (root / name).exists():
        pytest.skip(f"reference data {name} is not at {root}: set OCTAVO_SHARED to its folder")
    return root / name


def golden(kind: str) -> list[dict[str, Any]]:
    """The lines of golden/<kind>.jsonl."""
    return [json.loads(line) for line in shared(f"golden/{kind}.jsonl").read_text().splitlines()]
