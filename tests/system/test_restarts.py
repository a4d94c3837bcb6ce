"""A worker or a control plane that dies and comes back: streams go on, no token lost or repeated."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from asking import collect, request
from service import PORTS, free_ports, get, octavo, read_metrics, wait_for
from shared_files import golden

from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

STREAMS = 4
SHARES = {
    "controlplane": ("gateway_port", "worker_port", "controlplane_probe_port"),
    "worker": ("worker_port", "worker_probe_port"),
    "gateway": ("gateway_port", "grpc_port", "http_port"),
}


class Parts:
    """The three processes, each started on its own and restarted at will."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        options = {port: self.ports[port] for port in SHARES[name]}
        self.processes[name] = octavo(name, {**options}, self.folder / name)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def is_ready(self) -> bool:
        return get(f"http://127.0.0.1:{self.ports['http_port']}/ready")[0] == 200

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            finally:
                process.kill()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path)
    with ExitStack() as stack:
        stack.callback(parts.stop)
        for name in SHARES:
            parts.start(name)
        wait_for(parts.is_ready, "the service is ready")
        yield parts


@pytest.mark.parametrize("victim", ["worker", "controlplane"])
def test_streams_go_on_when_a_process_is_killed(parts: Parts, victim: str) -> None:
    lines = golden("greedy")[:STREAMS]
    with (
        grpc.insecure_channel(f"127.0.0.1:{parts.ports['grpc_port']}") as channel,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        stub = pb_grpc.GenerationStub(channel)
        calls = [stub.Generate(ask(line), timeout=120) for line in lines]
        firsts = [next(call) for call in calls]
        parts.kill(victim)
        wait_for(lambda: not parts.is_ready(), "health tells of it", 30)
        parts.start(victim)
        answers = list(pool.map(collect, calls))
    for line, first, answer in zip(lines, firsts, answers, strict=True):
        assert [*first.token_ids, *answer.samples[0].token_ids] == line["output_token_ids"]
        assert answer.counts == (
            len(line["prompt_token_ids"]),
            answer.counts[1],
            len(line["output_token_ids"]),
        )
    wait_for(lambda: is_idle(parts), "every block is free", 20)


def ask(line: dict[str, Any]) -> Any:
    return request(line["prompt_token_ids"], temperature=0.0, max_tokens=len(line["output_token_ids"]))


def is_idle(parts: Parts) -> bool:
    metrics = read_metrics(parts.ports["controlplane_probe_port"])
    held = sum(v for k, v in metrics.items() if "kv_blocks" in k and 'state="used"' in k)
    return held == 0 and sum(v for k, v in metrics.items() if "sequence_groups" in k) == 0


def test_a_seat_is_for_one_worker(parts: Parts) -> None:
    port = free_ports(1)[0]
    options = {"worker_port": parts.ports["worker_port"], "worker_probe_port": port, "gang": 0}
    second = octavo("worker", options, parts.folder / "second")
    assert second.wait(60) == 1
    assert "every rank of gang 0 is taken" in (parts.folder / "second").read_text()
    assert parts.is_ready()
