"""The stubs in the repository are those that protoc makes of the .proto files."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_current(tmp_path: Path) -> None:
    protos = [str(path) for path in sorted((ROOT / "proto/octavo/v1").glob("*.proto"))]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, *protos]
    subprocess.run(command, check=True)
    made = sorted((tmp_path / "octavo/v1").iterdir())
    assert [path.name for path in made], "protoc made nothing"
    for path in made:
        kept = ROOT / "proto/octavo/v1" / path.name
        assert kept.read_text() == path.read_text(), f"{path.name} is stale: run `make proto`"
