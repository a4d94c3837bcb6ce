"""A worker that stands still: health tells of it, requests wait, more are refused, memory is flat."""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from asking import request
from parts import Parts
from service import wait_for

from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

TIMEOUT = 3  # seconds without a heartbeat
AT_ONCE = 16  # calls, where each is answered soon
PATIENCE = 300.0  # seconds
GIVEN_BACK = 7.0  # seconds until an idle process has given back what it freed
PROMPT = [1, 4093, 198, 2683, 359]


@dataclass(frozen=True)
class Load:
    """Counts of requests."""

    warm_up: int
    queued: int
    refused: int


SHORT, LONG = Load(100, 1500, 1000), Load(1000, 2000, 10_000)
LONG_CASE = pytest.param(LONG, marks=[pytest.mark.full, pytest.mark.timeout(1200)], id="long")


def resident(parts: Parts, name: str) -> float:
    """Megabytes of memory that a process holds."""
    status = Path(f"/proc/{parts.processes[name].pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1e3


async def ask(stub: Any) -> str:
    """OK, or the name of the status code; a refusal must say when to retry."""
    message = request(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True)
    try:
        reply = await stub.GenerateUnary(message, timeout=PATIENCE)
    except grpc.aio.AioRpcError as error:
        hints = dict(error.trailing_metadata() or ())
        assert "grpc-retry-pushback-ms" in hints, error
        return error.code().name
    assert len(reply.choices[0].token_ids) == 2
    return "OK"


async def ask_many(stub: Any, count: int) -> list[str]:
    places = asyncio.Semaphore(AT_ONCE)

    async def in_turn() -> str:
        async with places:
            return await ask(stub)

    return await asyncio.gather(*(in_turn() for _ in range(count)))


async def until(condition: Any, what: str) -> None:
    await asyncio.to_thread(wait_for, condition, what)


async def stand_still(parts: Parts) -> None:
    """Stops the worker where it is; health must tell."""
    parts.pause("worker")
    await until(lambda: parts.probe()[0] == 503, "health tells of it")


async def run(parts: Parts, load: Load) -> dict[str, dict[str, float]]:
    """Megabytes of each process at each stage."""
    sizes: dict[str, dict[str, float]] = {}

    def weigh(stage: str) -> None:
        sizes[stage] = {name: resident(parts, name) for name in ("controlplane", "gateway")}

    async with grpc.aio.insecure_channel(parts.targets()[0]) as channel:
        stub = pb_grpc.GenerationStub(channel)
        # What a long queue or a lost worker cost the first times is not growth.
        assert set(await asyncio.gather(*(ask(stub) for _ in range(load.queued)))) == {"OK"}
        for _ in range(2):
            await stand_still(parts)
            parts.go_on("worker")
            await until(parts.is_ready, "the worker serves again")
        assert set(await ask_many(stub, load.warm_up)) == {"OK"}
        weigh("warm")
        await stand_still(parts)
        waiting = [asyncio.create_task(ask(stub)) for _ in range(load.queued)]
        name = 'octavo_sequence_groups{state="waiting"}'
        await until(lambda: parts.metrics()[name] == load.queued, "all wait")
        assert set(await ask_many(stub, 100)) == {"RESOURCE_EXHAUSTED"}
        weigh("full")
        assert set(await ask_many(stub, load.refused)) == {"RESOURCE_EXHAUSTED"}
        weigh("refused")
        assert not any(task.done() for task in waiting)
        parts.go_on("worker")
        assert set(await asyncio.gather(*waiting)) == {"OK"}
        await until(parts.is_idle, "every block is free")
        await asyncio.sleep(GIVEN_BACK)
        weigh("served")
    return sizes


@pytest.mark.parametrize("load", [pytest.param(SHORT, id="short"), LONG_CASE])
def test_a_full_queue(tmp_path: Path, load: Load) -> None:
    options: dict[str, dict[str, object]] = {
        "controlplane": {"heartbeat_timeout": TIMEOUT, "max_waiting_requests": load.queued},
        "gateway": {"max_live_requests": 2 * load.queued, "log_level": "warning"},
    }
    with Parts(tmp_path, options=options) as parts:
        sizes = asyncio.run(run(parts, load))
    print(sizes)
    for name in ("controlplane", "gateway"):
        grown = sizes["refused"][name] - sizes["full"][name]
        assert grown <= max(10.0, 0.05 * sizes["full"][name]), (name, sizes)
        assert sizes["served"][name] <= 1.1 * sizes["warm"][name], (name, sizes)
