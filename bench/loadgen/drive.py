"""Runs a list of requests against a server, in a closed or an open loop."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from loadgen.client import Client
from loadgen.lengths import Lengths
from loadgen.records import Record, RequestError
from loadgen.workload import ArrivalSpec, LengthSource, Request, make_requests

_WARMUP = LengthSource(synthetic=Lengths(32, 8))


@dataclass
class Run:
    """One run as it goes on. `records` grows as requests are sent."""

    requests: Sequence[Request]
    records: list[Record] = field(default_factory=list)
    started: float = 0.0  # perf_counter
    wall: float = 0.0  # seconds from the start to the end of the last request
    client_cpu: float = 0.0  # seconds of CPU that this process used meanwhile


async def warm_up(client: Client, count: int, vocab: int, seed: Sequence[int], timeout: float) -> None:
    """`count` short requests at once, not counted. Raises RequestError when one fails."""
    run = Run(make_requests(_WARMUP, ArrivalSpec(), count, vocab, seed))
    await closed_loop(client, run, count, timeout)
    for record in run.records:
        if record.failure:
            raise record.failure


async def closed_loop(client: Client, run: Run, clients: int, timeout: float) -> None:
    """`clients` clients; each sends its next request when its last has ended."""
    todo = iter(run.requests)
    with _measured(run):
        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, len(run.requests))):
                group.create_task(_one_client(client, run, todo, timeout))


async def open_loop(client: Client, run: Run, timeout: float) -> None:
    """Sends each request at its time, whether others have ended or not."""
    with _measured(run):
        async with asyncio.TaskGroup() as group:
            for request in run.requests:
                due = run.started + request.at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(_send(client, run, request, due, timeout))


async def _one_client(client: Client, run: Run, todo: Iterator[Request], timeout: float) -> None:
    for request in todo:
        await _send(client, run, request, time.perf_counter(), timeout)


async def _send(client: Client, run: Run, request: Request, due: float, timeout: float) -> None:
    """One request, start to end; its failure is kept in its record."""
    record = Record(len(request.prompt), request.output_tokens, due, sent=time.perf_counter())
    run.records.append(record)
    try:
        async with asyncio.timeout(timeout):
            await client.generate(request, record)
    except TimeoutError:
        record.failure = RequestError("timeout", f"no end after {timeout:g} s")
    except RequestError as failure:
        record.failure = failure
    except OSError as error:
        record.failure = RequestError("connection", str(error))
    record.ended = time.perf_counter()


@contextmanager
def _measured(run: Run) -> Iterator[None]:
    """Measures a run's time and what the client itself costs."""
    run.started, cpu = time.perf_counter(), time.process_time()
    yield
    run.wall = time.perf_counter() - run.started
    run.client_cpu = time.process_time() - cpu
