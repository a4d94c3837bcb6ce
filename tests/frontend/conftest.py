"""The demo model's files, opened once; one gateway process for each file of tests."""

from collections.abc import Iterator

import pytest
from gateway_scene import Process, running_gateway

from octavo.common.modelfiles import ModelFiles, open_model
from octavo.frontend.tokenizer import Tokenizer, Vocabulary, open_tokenizer


@pytest.fixture(scope="session")
def demo() -> ModelFiles:
    return open_model("demo")


@pytest.fixture(scope="session")
def tokenizer(demo: ModelFiles) -> Tokenizer:
    return open_tokenizer(demo)


@pytest.fixture(scope="session")
def byte_vocabulary() -> Vocabulary:
    """Token i is byte i; token 256 is special."""
    return Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], frozenset([256]), False)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with running_gateway(tmp_path_factory.mktemp("gateway") / "log") as process:
        yield process
