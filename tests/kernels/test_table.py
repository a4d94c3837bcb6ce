"""Which kernels a device gets, and that triton is loaded only for those who ask for it."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from octavo.kernels.table import (
    CPU,
    REFERENCE,
    KernelsError,
    kernels_for,
    kernels_named,
    native_kernels,
)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the extension had not been compiled."""
    native_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "octavo.kernels.cpu.native", None)
    monkeypatch.delattr("octavo.kernels.cpu.native")
    yield
    native_kernels.cache_clear()


def test_a_cpu_gets_its_own_kernels_and_others_by_name() -> None:
    native = native_kernels()
    assert native is not None, "the tests want the extension"
    assert (
        kernels_for("cpu") is kernels_named("auto", "cpu") is kernels_named("native", "cpu") is native
    )
    assert kernels_named("reference", "cpu") is REFERENCE


@pytest.mark.usefixtures("unbuilt")
def test_without_the_extension_torch_computes_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert kernels_for("cpu") is kernels_named("auto", "cpu") is CPU
    assert caplog.text.count("no native kernels") == 1
    with pytest.raises(KernelsError, match="were not built"):
        kernels_named("native", "cpu")


def test_native_kernels_are_not_for_gpus() -> None:
    with pytest.raises(KernelsError, match="compute on CPUs, and the device is cuda"):
        kernels_named("native", "cuda")


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
