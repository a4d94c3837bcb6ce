"""Which kernels a device gets, and that triton is loaded only for those who ask for it."""

import subprocess
import sys

import pytest

from octavo.kernels.table import CPU, REFERENCE, KernelsError, kernels_for, kernels_named


def test_a_cpu_gets_its_own_kernels_and_others_by_name() -> None:
    assert kernels_for("cpu") is kernels_named("auto", "cpu") is CPU
    assert kernels_named("reference", "cpu") is REFERENCE


def test_a_gpu_gets_triton() -> None:
    from octavo.kernels.triton.table import TRITON

    assert (
        kernels_for("cuda")
        is kernels_named("auto", "cuda")
        is kernels_named("triton", "cuda")
        is TRITON
    )
    assert kernels_named("reference", "cuda") is REFERENCE


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelsError, match="TRITON_INTERPRET=1"):
        kernels_named("triton", "cpu")


def test_without_triton_a_gpu_falls_back_and_a_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.table._has_triton", lambda: False)
    assert kernels_for("cuda") is REFERENCE
    with pytest.raises(KernelsError, match="not installed"):
        kernels_named("triton", "cuda")


def test_the_kernels_of_a_cpu_load_without_triton() -> None:
    code = """
import sys
from octavo.kernels.table import kernels_for
kernels_for("cpu")
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
