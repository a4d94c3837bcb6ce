"""Makes the packages beside the benchmark scripts importable, as running a script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
