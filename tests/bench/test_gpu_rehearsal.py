"""The script for GPUs, at toy sizes on the CPU: that its parts run and agree with the references."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_script_rehearses(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    command = [sys.executable, "bench/gpu.py", "--rehearse", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_text())["figures"]
    assert {figure["part"] for figure in figures} == {
        "correct",
        "attention",
        "model",
        "swap",
        "service",
    }
    left_out = [figure["case"] for figure in figures if figure["value"] is None]
    assert left_out == ["golden greedy tokens through the service"]
