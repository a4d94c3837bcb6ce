"""A service that cannot serve: it says so, queues what it may, refuses the rest, and recovers whole."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from asking import Answer, collect, request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service import Service, get, wait_for
from shared_files import golden

from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

GROWTH = 10 << 20  # bytes that a process may grow by, or 5 % if that is more


class Paused:
    """A service whose worker is stopped by a signal, and known to be."""

    def __init__(self, service: Service) -> None:
        assert service.process is not None
        self.service = service
        children = psutil.Process(service.process.pid).children()
        self.processes = {child.cmdline()[3]: child for child in children}

    def pause(self) -> None:
        self.processes["worker"].send_signal(signal.SIGSTOP)
        wait_for(lambda: get(f"{self.service.http}/ready")[0] == 503, "it is not ready", 30)

    def resume(self) -> None:
        self.processes["worker"].send_signal(signal.SIGCONT)

    def sizes(self) -> dict[str, int]:
        """Resident bytes of the processes that hold requests."""
        return {name: self.processes[name].memory_info().rss for name in ("controlplane", "gateway")}


@pytest.fixture
def paused(tmp_path_factory: pytest.TempPathFactory, queue: int) -> Iterator[Paused]:
    options: dict[str, object] = {
        "heartbeat_timeout": 2,
        "max_waiting_requests": queue,
        "max_live_requests": 2 * queue + 100,
    }
    with Service(tmp_path_factory.mktemp("paused") / "log", options) as service:
        scene = Paused(service)
        try:
            scene.pause()
            yield scene
        finally:
            scene.resume()


@pytest.mark.parametrize(
    ("queue", "refusals"),
    [
        (20, 300),
        pytest.param(2000, 10_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_what_is_beyond_the_queue_is_refused_and_what_is_in_it_served(
    paused: Paused, queue: int, refusals: int
) -> None:
    line = golden("greedy")[0]
    asked = request(line["prompt_token_ids"], temperature=0.0, max_tokens=4)
    with grpc.insecure_channel(paused.service.target) as channel, ThreadPoolExecutor(1) as pool:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = pb_grpc.GenerationStub(channel)
        empty = paused.sizes()
        waiting = [stub.Generate(asked, timeout=1500) for _ in range(queue)]
        wait_for(lambda: queued(paused.service) == queue, "the queue is full", 120)
        check_refusals(stub, asked, refusals // 10)
        check_http_refusal(paused.service, line["prompt_token_ids"])
        before = paused.sizes()
        check_refusals(stub, asked, refusals)
        check_growth(before, paused.sizes(), 0.05)
        assert queued(paused.service) == queue
        answers = pool.submit(lambda: [collect(call) for call in waiting])
        paused.resume()
        check_answers(answers.result(1500), line["output_token_ids"][:4])
    paused.service.wait_until_idle()
    check_growth(empty, paused.sizes(), 0.10)


def queued(service: Service) -> int:
    return int(service.metrics()['octavo_sequence_groups{state="waiting"}'])


def check_refusals(stub: Any, asked: Any, count: int) -> None:
    for _ in range(count):
        with pytest.raises(grpc.RpcError) as caught:
            stub.GenerateUnary(asked, timeout=60)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "requests wait" in error.details()
        assert dict(error.trailing_metadata())["retry-after"] == "1"


def check_http_refusal(service: Service, prompt: list[int]) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 4}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{service.base_url}/completions", json.dumps(body).encode(), timeout=60)
    assert (caught.value.code, caught.value.headers["Retry-After"]) == (429, "1")
    assert json.load(caught.value)["error"]["type"] == "rate_limit_error"


def check_answers(answers: list[Answer], tokens: list[int]) -> None:
    assert all(answer.samples[0].token_ids == tokens for answer in answers)


def check_growth(before: dict[str, int], after: dict[str, int], share: float) -> None:
    for name, old in before.items():
        allowed = max(GROWTH, int(old * share))
        assert after[name] - old <= allowed, f"the {name} grew: {old} to {after[name]} bytes"
