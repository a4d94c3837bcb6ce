"""A real gateway process whose control plane is the test."""

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import zmq.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from plane_driver import WAIT, Driver
from ports import free_ports

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

MODEL = "SmolLM2-135M-Instruct"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Process:
    """A gateway whose control plane is the test."""

    popen: subprocess.Popen[bytes]
    plane_port: int
    grpc_port: int
    http_port: int


@contextlib.contextmanager
def running_gateway(log: Path, *more: str) -> Iterator[Process]:
    """`more` are options that a test adds."""
    plane, grpc_port, http = free_ports(3)
    options = f"--gateway-port={plane} --grpc-port={grpc_port} --http-port={http} --max-live-requests=2"
    command = [sys.executable, "-m", "octavo.frontend.cli", "gateway", *options.split(), *more]
    with log.open("wb") as stream:
        popen = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield Process(popen, plane, grpc_port, http)
    finally:
        popen.kill()
        popen.wait()


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


incarnations = iter(range(100, 1000))


def play(gateway: Process, test: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with scene(gateway, next(incarnations)) as current:
            await test(current)

    asyncio.run(whole())


async def read(call: Any) -> list[pb.GenerateDelta]:
    return [delta async for delta in call]


def text(deltas: list[pb.GenerateDelta]) -> str:
    return "".join(delta.text for delta in deltas)
