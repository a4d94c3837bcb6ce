"""A service that many tests share, and helpers to start others."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from service import Service


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A whole service on the demo model; tests leave it idle."""
    with Service(tmp_path_factory.mktemp("service") / "log") as running:
        yield running
