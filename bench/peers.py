#!/usr/bin/env python3
"""Octavo and other OpenAI-compatible servers under the same load, in turns.

In each round every server gets the same requests, in closed loops, one loop for each number of clients.
Only one server runs at a time, since one that has just become idle may keep a core busy for seconds. A
server is a URL, which is left alone, or a command, which is started for each turn and stopped after it:

    python bench/peers.py --lengths lengths.csv --max-total 512 --rounds 3 --json peers.json \\
        --server 'octavo=octavo serve --dtype float32' \\
        --server 'vllm=vllm serve FOLDER --dtype float32 --port {port}' \\
        --server 'llama.cpp=llama-server -m FILE.gguf -np 64 -c 65536 -t 2 --port {port}' --base vllm

`{port}` is where a command's server shall answer HTTP, `{free}` another free port; `octavo serve` gets
its ports by itself. Variables go before the command: `NAME=env A=1 B=2 COMMAND`. Exit code 1: a request
failed or a server did not start.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from loadgen import options as checks
from loadgen import report
from loadgen.compare import Comparison, Turn, order
from loadgen.drive import Run, closed_loop, warm_up
from loadgen.http_client import HttpClient
from loadgen.lengths import InputError
from loadgen.options import Point
from loadgen.progress import progress
from loadgen.records import RequestError
from loadgen.servers import Server, read_server, serving
from loadgen.workload import ArrivalSpec, make_requests
from measure.machine import describe, write_json
from measure.processes import StartError, stop_on_sigterm


def main() -> int:
    options = _parser().parse_args()
    stop_on_sigterm()
    turns: list[Turn] = []
    try:
        servers, points = _servers(options), checks.closed_loops(options)
        for number in range(options.rounds):
            names = order(list(servers), number)
            turns += [_turn(servers[name], points, number, options) for name in names]
            _save(turns, options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (StartError, RequestError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if turns:  # hours of work: whole rounds are worth showing
            print(Comparison(turns).text(options.base))
        return 1
    print(Comparison(turns).text(options.base))
    return 1 if any(figures.failed for turn in turns for figures in turn.figures) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--server", action="append", required=True, metavar="NAME=URL|COMMAND", help="one for each"
    )
    parser.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="NAME",
        help="others are shown as multiples of it",
    )
    parser.add_argument("--rounds", type=checks.integer(1), default=3, help="default: 3")
    checks.add_closed_loops(parser)
    parser.add_argument("--vocab", type=checks.integer(21), default=49152, help="default: 49152")
    parser.add_argument("--warmup", type=checks.integer(0), default=8, help="requests of each turn")
    parser.add_argument("--timeout", type=checks.number(0.001), default=600.0, help="of a request, s")
    parser.add_argument("--start-timeout", type=checks.number(0.001), default=600.0, help="seconds")
    parser.add_argument("--progress", type=checks.number(0), default=30.0, help="seconds; 0: none")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


def _servers(options: argparse.Namespace) -> dict[str, Server]:
    servers = [read_server(text) for text in options.server]
    named = {server.name: server for server in servers}
    if len(named) < len(servers):
        raise InputError("--server: a name occurs twice")
    unknown = [name for name in options.base if name not in named]
    if unknown:
        raise InputError(f"--base {unknown[0]}: no --server has this name")
    return named


def _turn(server: Server, points: Sequence[Point], number: int, options: argparse.Namespace) -> Turn:
    with serving(server, options.start_timeout) as url:
        figures = uvloop.run(_measure(server.name, url, points, number, options))
    return Turn(number, server.name, tuple(figures))


async def _measure(
    name: str, url: str, points: Sequence[Point], number: int, options: argparse.Namespace
) -> list[report.Figures]:
    client = HttpClient(url, "completions", None, 0.0, {})
    seed = [options.seed, number, len(points)]
    await warm_up(client, options.warmup, options.vocab, seed, options.timeout)
    found = []
    for index, point in enumerate(points):
        run = _run(point, [options.seed, number, index], options)
        assert point.clients is not None  # closed loops only
        async with progress(run, f"{name}, {point.clients} clients", options.progress):
            await closed_loop(client, run, point.clients, options.timeout)
        found.append(report.figures(point.label, run))
        print(f"round {number + 1}, {name}, {_line(found[-1])}", file=sys.stderr, flush=True)
    return found


def _run(point: Point, seed: Sequence[int], options: argparse.Namespace) -> Run:
    """The same for every server; other prompts at each point and round, against prefix caches."""
    source = checks.length_source(options)
    return Run(make_requests(source, ArrivalSpec(), point.requests, options.vocab, seed))


def _line(figures: report.Figures) -> str:
    notes = "".join(f"; {note}" for note in report.remarks(figures))
    return f"{figures.label}: {figures.output_rate:.1f} output tokens/s{notes}"


def _save(turns: Sequence[Turn], options: argparse.Namespace) -> None:
    if options.json:
        write_json(options.json, describe(Comparison(turns).as_json(options.base), _config(options)))


def _config(options: argparse.Namespace) -> dict[str, Any]:
    return {**vars(options), "servers": [dataclasses.asdict(read_server(s)) for s in options.server]}


if __name__ == "__main__":
    sys.exit(main())
