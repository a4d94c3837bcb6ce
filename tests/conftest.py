"""Set-up of all tests: helpers beside this file are importable by name; runs can be resumed."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Several torch processes share the cores here: their threads must sleep while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton reads it once, when something imports it (transformers does): its kernels run interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", metavar="FILE", help="skip tests that FILE says passed on this commit")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--resume")
    if file:
        config.pluginmanager.register(_Resume(Path(file)))


class _Resume:
    """Notes the tests that pass, under the commit's name, and deselects them the next time."""

    def __init__(self, file: Path) -> None:
        self.file, self.state = file, _tree_state()
        lines = file.read_text().splitlines() if file.exists() else []
        self.passed = set(lines[1:]) if lines[:1] == [self.state] else set()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([self.state, *sorted(self.passed)]) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self.file.open("a") as stream:
                stream.write(report.nodeid + "\n")


def _tree_state() -> str:
    """Names the commit and what is changed on top of it."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "diff", "HEAD"])
    output = [subprocess.run(command, capture_output=True).stdout for command in commands]
    return output[0].decode().strip() + f"-{zlib.crc32(output[1]):08x}"
