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


@pytest.mark.parametrize(("given", "wanted"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, wanted: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    yield_idle_cores()
    assert os.environ["OMP_WAIT_POLICY"] == wanted
