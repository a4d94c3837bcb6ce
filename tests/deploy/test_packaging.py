"""What goes into the images: every package, and nothing that is not required."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "controlplane", "dataplane", "frontend", "kernels", "proto")
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "deploy" / "requirements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_folder_of_code_is_a_package_that_is_installed() -> None:
    folders = [path.parent for name in FOLDERS for path in (ROOT / name).rglob("__init__.py")]
    found = {"octavo." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert found | {"octavo.v1"} == set(TABLE["tool"]["setuptools"]["packages"])


def test_extras_are_followed(script: ModuleType) -> None:
    project = {
        "name": "octavo",
        "dependencies": ["a>=1"],
        "optional-dependencies": {"x": ["octavo[y]", "b"], "y": ["c; python_version > '3'"]},
    }
    assert script.requirements(project, []) == ["a>=1"]
    assert script.requirements(project, ["x"]) == ["a>=1", "c; python_version > '3'", "b"]


def test_the_control_plane_requires_little(script: ModuleType) -> None:
    lines = script.requirements(TABLE["project"], [])
    assert not [
        line for line in lines if line.startswith(("torch", "transformers", "openvino", "grpc"))
    ]
    assert any(line.startswith("torch") for line in script.requirements(TABLE["project"], ["worker"]))
