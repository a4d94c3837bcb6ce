"""The real gateway process, with the control plane's side driven by the test."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from plane_driver import WAIT, Driver

from octavo.frontend.tokenizer import Tokenizer
from octavo.proto.session import Cancel, Hello, Submit, Welcome
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

MODEL = "SmolLM2-135M-Instruct"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


@dataclass
class Process:
    """A gateway whose control plane is the test."""

    popen: subprocess.Popen[bytes]
    plane_port: int
    grpc_port: int
    http_port: int


@contextlib.contextmanager
def running_gateway(log: Path) -> Iterator[Process]:
    plane, grpc_port, http = free_ports(3)
    options = f"--gateway-port={plane} --grpc-port={grpc_port} --http-port={http} --max-live-requests=2"
    command = [sys.executable, "-m", "octavo.frontend.cli", "gateway", *options.split()]
    with log.open("wb") as stream:
        popen = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield Process(popen, plane, grpc_port, http)
    finally:
        popen.kill()
        popen.wait()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with running_gateway(tmp_path_factory.mktemp("gateway") / "log") as process:
        yield process


@dataclass
class Scene:
    """One test's connections to the gateway."""

    gateway: Process
    context: zmq.asyncio.Context
    driver: Driver
    stub: Any
    health: Any

    async def status(self) -> int:
        request = health_pb2.HealthCheckRequest()
        reply = await self.health.Check(request, wait_for_ready=True, timeout=WAIT)
        return int(reply.status)

    async def until_status(self, status: int) -> None:
        async with asyncio.timeout(WAIT):
            while await self.status() != status:
                await asyncio.sleep(0.02)

    async def new_control_plane(self, incarnation: int) -> None:
        """The old one dies; another one listens on its port."""
        self.driver.socket.close()
        await self.until_status(NOT_SERVING)
        self.driver = Driver(self.context, self.gateway.plane_port, incarnation)

    def generate(self, **sampling: Any) -> Any:
        request = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))
        return self.stub.Generate(request, wait_for_ready=True, timeout=WAIT)

    async def http(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str, Any]:
        """Status, body and headers."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.gateway.http_port}{path}"
        return await asyncio.to_thread(_http, url, data)


def _http(url: str, data: bytes | None) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=WAIT) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


@contextlib.asynccontextmanager
async def scene(gateway: Process, incarnation: int) -> AsyncIterator[Scene]:
    context = zmq.asyncio.Context()
    driver = Driver(context, gateway.plane_port, incarnation)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub, health = (
            _untyped(pb_grpc.GenerationStub, channel),
            _untyped(health_pb2_grpc.HealthStub, channel),
        )
        current = Scene(gateway, context, driver, stub, health)
        try:
            yield current
        finally:
            current.driver.socket.close()
            context.destroy(0)


def _untyped(stub: Any, channel: grpc.aio.Channel) -> Any:
    """Generated stubs have no types."""
    return stub(channel)


_incarnations = iter(range(100, 1000))


def play(gateway: Process, test: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with scene(gateway, next(_incarnations)) as current:
            await test(current)

    asyncio.run(whole())


async def read(call: Any) -> list[pb.GenerateDelta]:
    return [delta async for delta in call]


def text(deltas: list[pb.GenerateDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_health_follows_the_control_plane(gateway: Process) -> None:
    async def test(s: Scene) -> None:
        await s.driver.expect(Hello)
        await s.until_status(NOT_SERVING)
        assert (await s.http("/ready"))[0] == 503
        assert (await s.http("/health"))[0] == 200
        await s.driver.send(Welcome(controlplane=s.driver.incarnation, ready=True))
        await s.until_status(SERVING)
        assert (await s.http("/ready"))[0] == 200
        await s.driver.send(Welcome(controlplane=s.driver.incarnation, ready=False))
        await s.until_status(NOT_SERVING)
        await s.driver.send(Welcome(controlplane=s.driver.incarnation, ready=True))
        await s.until_status(SERVING)
        s.driver.socket.close()
        await s.until_status(NOT_SERVING)

    play(gateway, test)


def test_streams_go_on_when_the_control_plane_is_replaced(
    gateway: Process, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("The quick brown fox — 東京 😀 — jumps over the lazy dog.")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=len(ids), ignore_eos=True)))
        first = await s.driver.expect(Submit)
        await s.driver.tokens(first, 0, 0, ids[:5])
        await s.driver.tokens(first, 0, 3, ids[3:9])  # overlaps what was sent
        await s.new_control_plane(next(_incarnations))
        await s.driver.welcome()
        second = await s.driver.expect(Submit)
        have = second.samples[0].tokens.tolist()
        assert (second.request, second.attempt) == (first.request, 1)
        assert second.sampling.seed == first.sampling.seed
        assert have == ids[: len(have)]
        await s.driver.tokens(second, 0, len(have), ids[len(have) :])
        await s.driver.finish(second, 0)
        deltas = await reading
        assert [token for delta in deltas for token in delta.token_ids] == ids
        assert text(deltas) == tokenizer.decode(ids)
        assert deltas[-1].usage.completion_tokens == len(ids)

    play(gateway, test)


def test_a_stop_string_is_cancelled_and_cut_off(gateway: Process, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" one two three four")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=50, stop=["o three"])))
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, ids)
        assert (await s.driver.expect(Cancel)).request == submit.request
        deltas = await reading
        assert text(deltas) == " one tw"
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason == "o three"
        assert deltas[-1].usage.completion_tokens == 3

    play(gateway, test)


def test_more_requests_than_the_limit_are_refused_at_once(gateway: Process) -> None:
    async def test(s: Scene) -> None:
        await s.driver.welcome()
        waiting = [s.generate(max_tokens=5) for _ in range(2)]
        readers = [asyncio.ensure_future(read(call)) for call in waiting]
        submits = [await s.driver.expect(Submit) for _ in waiting]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(s.generate(max_tokens=5))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limit of 2 live requests" in str(caught.value.details())
        trailers = dict(caught.value.trailing_metadata() or ())
        assert trailers["grpc-retry-pushback-ms"] == "1000"
        status, body, headers = await s.http("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        for call in waiting:
            call.cancel()
        cancelled = {(await s.driver.expect(Cancel)).request for _ in waiting}
        assert cancelled == {submit.request for submit in submits}
        await asyncio.gather(*readers, return_exceptions=True)

    play(gateway, test)


def test_a_stopped_gateway_lets_streams_finish(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" one two three four")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=len(ids))))
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, ids[:2])
        s.gateway.popen.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        await s.driver.tokens(submit, 0, 2, ids[2:])
        await s.driver.finish(submit, 0)
        assert text(await reading) == " one two three four"
        assert await asyncio.to_thread(s.gateway.popen.wait, WAIT) == 0

    with running_gateway(tmp_path / "log") as process:
        play(process, test)


def test_the_gateway_loads_no_model_library() -> None:
    code = (
        "import sys, octavo.frontend.gateway, octavo.frontend.commands; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_options_load_no_server_library() -> None:
    code = (
        "import sys, octavo.frontend.options; "
        "sys.exit(bool({'grpc', 'fastapi', 'tokenizers', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
