"""The demo model in a gang of three real ranks: the tokens of one worker, whatever befalls a rank."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from parts import Parts
from service import wait_for
from shared_files import golden

from octavo.frontend.client import Client

pytestmark = [pytest.mark.system, pytest.mark.full]

RANKS = 3
STREAMS = 4
OPTIONS: dict[str, dict[str, object]] = {
    "controlplane": {"tensor_parallel": RANKS, "heartbeat_timeout": 3},
    "worker": {"tensor_parallel": RANKS, "num_kv_blocks": 64, "swap_blocks": 16, "threads": 1},
}


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with Parts(tmp_path, workers=RANKS, options=OPTIONS) as parts:
        yield parts
        codes = parts.stop()
    assert set(codes.values()) == {0}, codes


class Streams:
    """Golden prompts read at once, and how many tokens have come together."""

    def __init__(self, target: str) -> None:
        self._target, self._lock = target, threading.Lock()
        self.lines: list[dict[str, Any]] = golden("greedy")[:STREAMS]
        self.received = 0

    def run(self, line: dict[str, Any]) -> list[int]:
        tokens: list[int] = []
        sampling = {"temperature": 0.0, "max_tokens": len(line["output_token_ids"])}
        with Client(self._target) as client:
            for delta in client.generate(line["prompt_token_ids"], timeout=300, **sampling):
                tokens += delta.token_ids
                with self._lock:
                    self.received += len(delta.token_ids)
        return tokens


@pytest.mark.parametrize(
    ("what", "victim"),
    [
        ("nothing", ""),
        ("kill", "worker"),
        ("kill", "worker2"),
        ("pause", "worker"),
        ("pause", "worker3"),
    ],
)
def test_streams_of_a_gang_are_the_golden_ones(parts: Parts, what: str, victim: str) -> None:
    streams = Streams(parts.targets()[0])
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(streams.run, line) for line in streams.lines]
        if what != "nothing":
            wait_for(lambda: streams.received >= 5 * STREAMS, "the streams are under way", 120)
            _disturb(parts, what, victim)
        told = [answer.result() for answer in answers]
    assert told == [line["output_token_ids"] for line in streams.lines]
    wait_for(parts.is_idle, "nothing is held", 30)


def _disturb(parts: Parts, what: str, name: str) -> None:
    """A lost worker returns."""
    if what == "kill":
        parts.kill(name)
        parts.start(name)
        return
    parts.pause(name)
    wait_for(lambda: not parts.is_ready(), "the gang is known to be incomplete", 60)
    parts.go_on(name)
