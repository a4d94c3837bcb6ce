#!/usr/bin/env python3
"""Several gangs of workers beside one gang, on the same cores: throughput, and equal outputs.

In each round a fresh service is started for each number of gangs, in turns; the threads of all its
workers together are as many as the machine has cores. The same greedy requests run in a closed loop.
Where cores are few, more gangs read the weights more often and no speed-up is to be expected: gangs are
for machines of their own, or devices.

    python bench/gangs.py --gangs 1,2 --clients 16 --requests 32 --rounds 3
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from loadgen.options import integer
from measure.figures import number as shown
from measure.figures import table
from measure.machine import describe, write_json
from measure.processes import StartError, running, stop_on_sigterm
from measure.services import Ports, serve_command

from octavo.frontend.client import Client, ClientError

_TIMEOUT = 600.0  # seconds, of a start and of a request
_WORDS = ("river", "stone", "light", "garden", "winter", "letter", "market", "music", "a", "the", "of")


@dataclass(frozen=True)
class Outcome:
    """One run of all requests."""

    speed: float  # output tokens per second
    tokens: tuple[tuple[int, ...], ...]  # of each request
    shares: tuple[int, ...]  # plans that each gang ran


def main() -> int:
    options = _parser().parse_args()
    stop_on_sigterm()
    prompts = _prompts(options.requests, options.seed, options.words)
    found: dict[int, list[Outcome]] = {count: [] for count in options.gangs}
    try:
        for number in range(options.rounds):
            for count in options.gangs:
                outcome = _run(count, prompts, options)
                found[count].append(outcome)
                print(f"round {number + 1}, gangs {count}: {outcome.speed:.0f}/s", file=sys.stderr)
    except (StartError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_text(found, options.gangs[0]))
    if options.json:
        speeds = {count: [each.speed for each in runs] for count, runs in found.items()}
        report = {"tokens_per_second": speeds, "different": _different(found, options.gangs[0])}
        write_json(options.json, describe(report, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    counts = {"type": lambda text: [int(part) for part in text.split(",")], "default": [1, 2]}
    parser.add_argument("--gangs", metavar="N,...", help="default: 1,2", **counts)
    parser.add_argument("--clients", type=integer(1), default=16, help="default: 16")
    parser.add_argument("--requests", type=integer(1), default=32, help="default: 32")
    parser.add_argument("--words", type=integer(1), default=60, help="of a prompt (default: 60)")
    parser.add_argument("--max-tokens", type=integer(1), default=64, help="default: 64")
    parser.add_argument("--rounds", type=integer(1), default=3, help="default: 3")
    parser.add_argument("--seed", type=integer(0), default=0, help="of the prompts")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


def _prompts(count: int, seed: int, words: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(_WORDS, k=words)) for _ in range(count)]


def _run(count: int, prompts: Sequence[str], options: argparse.Namespace) -> Outcome:
    """Starts a service of `count` gangs and runs all requests. Raises StartError, ClientError."""
    ports = Ports.free()
    threads = max(1, (os.cpu_count() or 1) // count)
    command = serve_command([f"--workers={count}", f"--threads={threads}"], ports)
    with running(f"octavo serve with {count} gangs", command) as service:
        service.wait_for(ports.http, "/ready", _TIMEOUT)
        with Client(f"127.0.0.1:{ports.grpc}") as client, ThreadPoolExecutor(options.clients) as pool:
            _wait_for_gangs(client, count)

            def ask(prompt: str) -> tuple[int, ...]:
                sampling = {"temperature": 0.0, "max_tokens": options.max_tokens, "ignore_eos": True}
                deltas = client.generate(prompt, timeout=_TIMEOUT, **sampling)
                return tuple(token for delta in deltas for token in delta.token_ids)

            list(pool.map(ask, prompts[: options.clients]))  # a warm-up, not counted
            before = _plans(client)
            started = time.perf_counter()
            tokens = tuple(pool.map(ask, prompts))
            wall = time.perf_counter() - started
            shares = tuple(now - then for now, then in zip(_plans(client), before, strict=True))
    return Outcome(sum(map(len, tokens)) / wall, tokens, shares)


def _wait_for_gangs(client: Client, count: int) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while sum(gang.ready for gang in client.server_info().gangs) < count:
        if time.monotonic() > deadline:
            raise StartError(f"{count} gangs were not ready within {_TIMEOUT:g} s")
        time.sleep(0.1)


def _plans(client: Client) -> list[int]:
    return [gang.plans for gang in client.server_info().gangs]


def _different(found: dict[int, list[Outcome]], first: int) -> int:
    """Tokens that are not those of the first run."""
    wanted = found[first][0].tokens
    return sum(
        a != b
        for runs in found.values()
        for outcome in runs
        for mine, theirs in zip(outcome.tokens, wanted, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def _text(found: dict[int, list[Outcome]], first: int) -> str:
    base = [outcome.speed for outcome in found[first]]
    rows = []
    for count, runs in found.items():
        speeds = [outcome.speed for outcome in runs]
        ratio = statistics.median(a / b for a, b in zip(speeds, base, strict=True))
        shares = "+".join(map(str, runs[-1].shares))
        rows.append([str(count), shown(statistics.median(speeds)), f"{ratio:.2f}", shares])
    total = sum(len(t) for runs in found.values() for outcome in runs for t in outcome.tokens)
    header = ["gangs", "output tokens/s", f"over {first}", "plans of each, last round"]
    return (
        f"{table(header, rows)}\n{_different(found, first)} of {total} tokens differ from the first run"
    )


if __name__ == "__main__":
    sys.exit(main())
