from pathlib import Path

import pytest
import quality

from octavo.common.modelfiles import open_model
from octavo.common.options import OptionError


def test_the_repositorys_text_is_long_enough() -> None:
    options = quality._parser().parse_args([])
    parts = quality._windows(open_model("demo"), options)
    assert sum(map(len, parts)) == options.tokens >= 1000


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Only a few words.")
    options = quality._parser().parse_args(["--text", str(tmp_path / "short.txt")])
    with pytest.raises(OptionError, match=r"--tokens 2048: the text has \d tokens"):
        quality._windows(open_model("demo"), options)


def test_default_variants_are_options_of_a_worker() -> None:
    for text in quality._VARIANTS.values():
        assert quality.parse_engine_options(text).engine in ("auto", "openvino")
