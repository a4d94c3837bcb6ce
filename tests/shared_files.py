"""Finds the reference data that is not part of the project (golden outputs, traces)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def _root() -> Path:
    return Path(os.environ.get("OCTAVO_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shared(name: str) -> Path:
    """A file of the reference data; where it is not there, skips the test or the module that asks."""
    root = _root()
    if not (root / name).exists():
        reason = f"reference data {name} is not at {root}: set OCTAVO_SHARED to its folder"
        pytest.skip(reason, allow_module_level=True)  # modules read it, too
    return root / name


def golden(kind: str) -> list[dict[str, Any]]:
    """The lines of golden/<kind>.jsonl."""
    return [json.loads(line) for line in shared(f"golden/{kind}.jsonl").read_text().splitlines()]


def golden_or_none(kind: str) -> list[dict[str, Any]]:
    """As `golden`, but empty where the data is not there: for tests that can do without."""
    return golden(kind) if (_root() / f"golden/{kind}.jsonl").exists() else []
