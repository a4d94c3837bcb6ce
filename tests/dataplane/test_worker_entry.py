"""The entry point stays light, and sets what torch reads when it is loaded."""

import os
import subprocess
import sys

import pytest

from octavo.dataplane.worker import yield_idle_cores


def test_options_and_entry_point_load_without_torch() -> None:
    code = """
import sys
import octavo.dataplane.options, octavo.dataplane.worker
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("policy", "spins", "wanted"),
    [(None, None, "10000"), (None, "5", "5"), ("ACTIVE", None, None), ("PASSIVE", "7", "7")],
)
def test_waiting_threads_spin_shortly_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, policy: str | None, spins: str | None, wanted: str | None
) -> None:
    for name, value in (("OMP_WAIT_POLICY", policy), ("GOMP_SPINCOUNT", spins)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    yield_idle_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == wanted
    assert os.environ.get("OMP_WAIT_POLICY") == policy
