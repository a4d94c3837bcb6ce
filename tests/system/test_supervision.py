"""`octavo serve` looks after its processes: what crashes comes back, what cannot run ends it."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from asking import request, stream
from service import PORTS, Service, free_ports, get, octavo, read_metrics, wait_for
from shared_files import golden

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system


def children(service: Service, command: str) -> list[psutil.Process]:
    assert service.process is not None
    found = psutil.Process(service.process.pid).children()
    return [child for child in found if child.cmdline()[3:4] == [command]]


def restarts(service: Service, name: str) -> list[str]:
    """The pauses that were announced."""
    text = rf"the {name} exited with status -9: it is started again in (\S+) s"
    return re.findall(text, service.log.read_text())


def is_ready(service: Service) -> bool:
    return get(f"{service.http}/ready")[0] == 200


def test_a_crash_is_answered_with_longer_and_longer_pauses(tmp_path: Path) -> None:
    """Also before anything is ready: a signal is no refusal of the options."""
    service = Service(tmp_path / "log", dict(zip(PORTS, free_ports(len(PORTS)), strict=True)))
    service.process = octavo("serve", service.options, service.log)
    try:
        for count, pause in enumerate(("0.5", "1", "2"), start=1):
            wait_for(lambda: bool(children(service, "controlplane")), "it runs", 20)
            children(service, "controlplane")[0].kill()
            wait_for(lambda n=count: len(restarts(service, "controlplane")) >= n, "it is noticed", 20)
            assert restarts(service, "controlplane")[-1] == pause
    finally:
        assert service.stop() == 0


@pytest.mark.full
@pytest.mark.parametrize("victim", ["controlplane", "worker", "gateway"])
def test_what_crashes_comes_back_and_serves(shared: Service, victim: str) -> None:
    before = len(restarts(shared, victim))
    for count, pause in enumerate(("0.5", "1"), start=before + 1):
        children(shared, victim)[0].kill()
        wait_for(lambda n=count: len(restarts(shared, victim)) >= n, "it is noticed", 20)
        assert restarts(shared, victim)[-1] == pause
        wait_for(lambda: bool(children(shared, victim)), "it runs again", 20)
        wait_for(lambda: is_ready(shared), "the service is ready again", 60)
    line = golden("greedy")[0]
    length = len(line["output_token_ids"])
    with grpc.insecure_channel(shared.target) as channel:
        message = request(line["prompt_token_ids"], temperature=0.0, max_tokens=length)
        answer = stream(pb_grpc.GenerationStub(channel), message)
    assert answer.samples[0].token_ids == line["output_token_ids"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of this file: its processes are killed and come back."""
    with Service(tmp_path_factory.mktemp("supervised") / "log") as service:
        yield service
        assert service.stop() == 0


@pytest.mark.full
def test_several_workers_are_several_gangs(tmp_path: Path) -> None:
    base = free_ports(1)[0]
    with Service(tmp_path / "log", {"workers": 2, "worker_probe_port": base}) as service:
        assert len(children(service, "worker")) == 2
        lines = [" ".join(child.cmdline()) for child in children(service, "worker")]
        assert sorted(re.findall(r"--gang (\d) --rank (\d)", " ".join(lines))) == [
            ("0", "0"),
            ("1", "0"),
        ]
        with grpc.insecure_channel(service.target) as channel:
            stub = pb_grpc.GenerationStub(channel)
            wait_for(lambda: ready_gangs(stub) == 2, "both gangs are ready", 60)
        for number in range(2):
            assert get(f"http://127.0.0.1:{base + number}/ready")[0] == 200
            assert read_metrics(base + number)["octavo_worker_live_slots"] == 0
        assert service.stop() == 0


def ready_gangs(stub: pb_grpc.GenerationStub) -> int:
    info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    return sum(gang.ready for gang in info.gangs)
