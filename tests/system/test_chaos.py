"""Any process is killed, or hangs for longer than its timeout: every stream is that of a quiet day.

Sixteen streams over two gateways; at a random moment one process dies or is stopped. Clients use the
Python client, which goes on at the other gateway. No token may be lost, repeated or changed, and
afterwards nothing may be left: no block, no process, no port, no shared memory.
"""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from parts import Parts
from service import wait_for
from undisturbed import MARGIN, Case, least_margins, run_undisturbed

from octavo.frontend.client import Client

pytestmark = [pytest.mark.system]

ROUNDS = 5
PAUSE = 6.0  # seconds, longer than any timeout below
OPTIONS: dict[str, dict[str, object]] = {
    "controlplane": {"heartbeat_timeout": 3, "plan_timeout": 4, "lease": 4},
    "worker": {"num_kv_blocks": 64, "swap_blocks": 16},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    with Parts(tmp_path_factory.mktemp("quiet")) as parts:
        return run_undisturbed(parts.targets()[0])


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    shared_memory = set(os.listdir("/dev/shm"))
    with Parts(tmp_path, gateways=2, options=OPTIONS) as parts:
        yield parts
        codes = parts.stop()
    assert set(codes.values()) == {0}, codes
    assert set(os.listdir("/dev/shm")) <= shared_memory
    for port in parts.ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    assert not _left_of(parts), "a process is left"


def _left_of(parts: Parts) -> list[int]:
    """Processes of the service, and their children, that are still there."""
    ours = {process.pid for process in parts.processes.values()}
    found = psutil.process_iter(["ppid"])
    return [process.pid for process in found if ours & {process.pid, process.info["ppid"]}]


class Streams:
    """Sixteen clients that read at once, and how many tokens they have together."""

    def __init__(self, targets: list[str], cases: list[Case], may_move: bool) -> None:
        """`may_move`: clients may go on at the other gateway; else a stream must not break."""
        self._targets, self._cases, self._may_move = targets, cases, may_move
        self._lock = threading.Lock()
        self.received = 0

    @property
    def total(self) -> int:
        return sum(len(case.tokens) for case in self._cases)

    def run(self, index: int) -> tuple[int, ...]:
        case, tokens = self._cases[index], list[int]()
        turned = self._targets if index % 2 else self._targets[::-1]
        targets, patience = (turned, 90.0) if self._may_move else (turned[:1], 0.0)
        with Client(targets, patience=patience) as client:
            for delta in client.generate(case.prompt, timeout=180, **case.sampling):
                tokens += delta.token_ids
                with self._lock:
                    self.received += len(delta.token_ids)
        return tuple(tokens)


@pytest.mark.parametrize(
    "turn", [pytest.param(i, marks=() if i == 0 else pytest.mark.full) for i in range(ROUNDS)]
)
@pytest.mark.parametrize("victim", ["worker", "controlplane", "gateway"])
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_streams_are_those_of_a_quiet_day(
    parts: Parts, cases: list[Case], how: str, victim: str, turn: int
) -> None:
    streams = Streams(parts.targets(), cases, may_move=victim == "gateway")
    moment = random.Random(f"{how}{victim}{turn}").uniform(0.05, 0.7) * streams.total
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = [pool.submit(streams.run, index) for index in range(len(cases))]
        wait_for(lambda: streams.received >= moment, "the moment has come")
        assert streams.received < streams.total, "nothing is left to disturb"
        _disturb(parts, how, victim)
        told = [answer.result() for answer in answers]
    assert streams.received == streams.total
    for case, tokens in zip(cases, told, strict=True):
        assert tokens == case.tokens
    wait_for(parts.is_ready, "the service is ready again", 30)
    wait_for(parts.is_clean, "nothing is held", 30)


def _disturb(parts: Parts, how: str, victim: str) -> None:
    if how == "kill":
        parts.kill(victim)
    else:
        parts.pause(victim)
    if victim != "gateway":
        wait_for(lambda: parts.probe("gateway2")[0] == 503, "health tells of it", PAUSE)
    if how == "kill":
        parts.start(victim)
        return
    time.sleep(PAUSE)
    parts.go_on(victim)


def test_the_streams_are_sure_of_their_tokens(cases: list[Case]) -> None:
    """What the tests above compare does not depend on how a batch is summed."""
    assert min(least_margins(cases)) >= MARGIN
