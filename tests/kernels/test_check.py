"""Kernels compile for cards that are not here, and what they take of them is judged."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from octavo.kernels.check.compiling import Cost, as_record, faults_of
from octavo.kernels.check.report import line, markdown
from octavo.kernels.check.variants import ARCHS, BLOCK_SIZES, GROUPS, HEAD_DIMS, Variant, variants

ATTENTION = [variant for variant in variants() if variant.is_attention]


def test_an_attention_kernel_compiles_for_a_card_without_a_spill(tmp_path: Path) -> None:
    """In a process of its own, since nothing compiles where kernels are interpreted."""
    file = tmp_path / "check.json"
    only = ["--arch", "sm_90", "--only", "chunks d128 g4 b8", "--processes", "1", "--json", str(file)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.kernels.check", *only],
        capture_output=True,
        text=True,
        timeout=200,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(file.read_text())
    assert len(records) >= 1
    for record in records:
        assert (record["spilled_bytes"], record["matrix"], record["faults"]) == (0, "HGMMA", [])
        assert 0 < record["registers"] <= 255
        assert 0 < record["shared_bytes"] <= 227 << 10


def chunk() -> Variant:
    return next(v for v in ATTENTION if v.arch.name == "sm_90" and v.wants_wide_matrix)


def test_what_must_not_be_is_a_fault() -> None:
    good = Cost(registers=128, spilled=0, shared=100_000, matrix="HGMMA")
    assert faults_of(chunk(), good) == []
    assert faults_of(chunk(), replace(good, spilled=8)) == ["spills 8 bytes"]
    assert "shared memory" in faults_of(chunk(), replace(good, shared=300_000))[0]
    assert faults_of(chunk(), replace(good, matrix="HMMA")) == ["multiplies with HMMA instead of HGMMA"]
    norm = next(v for v in variants() if v.name == "normalize_rows")
    assert faults_of(norm, replace(good, spilled=8, matrix="")) == []


def test_every_card_gets_every_size_group_and_block() -> None:
    for arch in ARCHS:
        constants = [v.constants for v in ATTENTION if v.arch is arch]
        for name, values in (("HEAD_DIM", HEAD_DIMS), ("GROUP", GROUPS), ("BLOCK_SIZE", BLOCK_SIZES)):
            assert {found[name] for found in constants} == set(values)
        assert {v.dtype for v in ATTENTION if v.arch is arch} == {"fp16", "bf16", "fp8", "fp32"}


def test_the_report_shows_the_most_that_a_family_takes() -> None:
    small = as_record(chunk(), Cost(99, 0, 1024, "HGMMA"))
    large = as_record(chunk(), Cost(120, 8, 2048, "HGMMA"))
    assert "spills 8 bytes" in line(large)
    lines = markdown([small, large, {**small, "arch": "sm_80"}]).splitlines()
    assert lines[0] == "| kernel | variants | sm_90 | sm_80 |"
    assert lines[2].endswith("| 120 / 8 / 2 HGMMA | 99 / 0 / 1 HGMMA |")
    assert len(lines) == 3
