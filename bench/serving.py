#!/usr/bin/env python3
"""Loads an LLM server over OpenAI's HTTP API or Octavo's gRPC, and prints throughput and latencies.

Exit code 0: every request completed (and, with --idle-check, every block is free again); 1: not so;
2: a wrong option or input file.

    python bench/serving.py --grpc 127.0.0.1:50051 --lengths lengths.csv --max-total 512 --requests 64
    python bench/serving.py --url http://127.0.0.1:8000 --sweep 1,4,16,64 --sweep-requests 4,12,32,64
"""

import sys
from dataclasses import asdict
from typing import Any

import uvloop
from loadgen import report
from loadgen.client import Client
from loadgen.drive import Run, closed_loop, open_loop, warm_up
from loadgen.grpc_client import GrpcClient
from loadgen.http_client import HttpClient
from loadgen.idle import Idle, wait_until_idle
from loadgen.lengths import InputError
from loadgen.options import Options, Point, read_options
from loadgen.progress import progress
from loadgen.records import RequestError
from loadgen.workload import make_requests
from measure.machine import describe, write_json


def main() -> int:
    options = read_options()
    try:
        runs = [_prepare(options, index) for index in range(len(options.points))]
        return uvloop.run(_measure(options, runs))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RequestError, OSError) as error:
        print(f"error: the server at {options.url or options.grpc}: {error}", file=sys.stderr)
        return 1


def _prepare(options: Options, index: int) -> Run:
    """The run of one point. Raises InputError."""
    # Prompts of different points differ, so that none finds another's prefix in a cache.
    seed = [options.seed, index]
    count = options.points[index].requests
    return Run(make_requests(options.source, options.arrival, count, options.vocab, seed))


async def _measure(options: Options, runs: list[Run]) -> int:
    client = _client(options)
    try:
        model = await client.model()
        await _warm_up(client, options)
        results = [
            await _run_point(client, options, point, run)
            for point, run in zip(options.points, runs, strict=True)
        ]
    finally:
        await client.close()
    print(report.text(results[0]) if len(results) == 1 else report.sweep_text(results))
    idle = await _idle_check(options)
    if options.json:
        write_json(options.json, _json_report(options, model, results, runs, idle))
    failed = any(result.failed for result in results) or bool(idle and idle.problems)
    return 1 if failed else 0


def _client(options: Options) -> Client:
    if options.url:
        return HttpClient(options.url, options.api, options.model, options.temperature, options.extra)
    assert options.grpc is not None  # read_options sees to one of the two
    return GrpcClient(options.grpc, options.model, options.temperature)


async def _warm_up(client: Client, options: Options) -> None:
    """Requests that are not counted. Raises RequestError when the server cannot serve them."""
    seed = [options.seed, len(options.points)]
    await warm_up(client, options.warmup, options.vocab, seed, options.timeout)


async def _run_point(client: Client, options: Options, point: Point, run: Run) -> report.Figures:
    label = _label(options, point)
    async with progress(run, label, options.progress):
        if point.clients is None:
            await open_loop(client, run, options.timeout)
        else:
            await closed_loop(client, run, point.clients, options.timeout)
    return report.figures(label, run)


async def _idle_check(options: Options) -> Idle | None:
    if not options.idle_check or options.grpc is None:
        return None
    client = GrpcClient(options.grpc, options.model, options.temperature)
    try:
        idle = await wait_until_idle(client, options.idle_timeout)
    finally:
        await client.close()
    print("\n" + idle.text())
    return idle


def _label(options: Options, point: Point) -> str:
    if point.clients is not None:
        return point.label
    rate = f" at {options.arrival.rate:g}/s" if options.arrival.rate else ""
    return {"all": "all at once"}.get(options.arrival.kind, options.arrival.kind) + rate


def _json_report(
    options: Options,
    model: str,
    results: list[report.Figures],
    runs: list[Run],
    idle: Idle | None,
) -> dict[str, Any]:
    figures = [
        {**result.as_json(), "per_request": report.per_request(run)}
        for result, run in zip(results, runs, strict=True)
    ]
    found = {"model": model, "runs": figures, "idle": asdict(idle) if idle else None}
    return describe(found, asdict(options))


if __name__ == "__main__":
    sys.exit(main())
