"""The command line of the load generator."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadgen import arrivals
from loadgen.http_client import APIS
from loadgen.lengths import InputError, Lengths
from loadgen.workload import FIRST_PLAIN_TOKEN, ArrivalSpec, LengthSource


@dataclass(frozen=True)
class Point:
    """One run: how many requests, and by how many clients of a closed loop (None: open loop)."""

    requests: int
    clients: int | None

    @property
    def label(self) -> str:
        """Of a closed loop, such as "4 clients"."""
        return f"{self.clients} client{'' if self.clients == 1 else 's'}"


@dataclass(frozen=True)
class Options:
    """What to measure, checked."""

    url: str | None
    grpc: str | None
    api: str
    model: str | None
    temperature: float
    extra: dict[str, Any]
    source: LengthSource
    arrival: ArrivalSpec
    points: list[Point]
    vocab: int
    seed: int
    warmup: int
    timeout: float
    idle_check: bool
    idle_timeout: float
    progress: float
    json: str | None


def read_options(arguments: list[str] | None = None) -> Options:
    """The options of a command line; prints a message and exits with 2 where it is wrong."""
    parser = _parser()
    values = parser.parse_args(arguments)
    try:
        return _checked(values)
    except InputError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Loads an LLM server and prints what it gave.")
    _add_server(parser.add_argument_group("server"))
    _add_lengths(parser.add_argument_group("requests"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_output(parser.add_argument_group("run and report"))
    return parser


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    group.add_argument(
        "--grpc", metavar="HOST:PORT", help="an Octavo gateway; with --url only for --idle-check"
    )
    group.add_argument(
        "--api", choices=APIS, default="completions", help="of --url (default: completions)"
    )
    group.add_argument("--model", help="default: the first that the server names")
    group.add_argument("--temperature", type=number(0), default=0.0, help="default: 0, greedy")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields for --url"
    )


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--lengths", metavar="CSV", help="header prompt_tokens,output_tokens; sampled")
    source.add_argument(
        "--trace",
        metavar="CSV",
        help="header TIMESTAMP,ContextTokens,GeneratedTokens; in order from its start",
    )
    source.add_argument(
        "--synthetic", type=_pair, metavar="P,O", help="every request alike (default: 128,64)"
    )
    group.add_argument(
        "--max-total", type=integer(2), metavar="N", help="keep prompt + output <= N tokens"
    )
    group.add_argument("--requests", type=integer(1), default=32, help="how many (default: 32)")
    group.add_argument(
        "--vocab", type=integer(FIRST_PLAIN_TOKEN + 1), default=49152, help="default: 49152"
    )
    group.add_argument(
        "--seed", type=integer(0), default=0, help="of lengths, arrivals and prompts (default: 0)"
    )


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--arrival", choices=arrivals.KINDS, help="open loop (default: trace with --trace, else all)"
    )
    group.add_argument("--rate", type=number(1e-6), help="requests per second; stretches a trace")
    group.add_argument("--clients", type=integer(1), help="closed loop with this many clients")
    group.add_argument(
        "--sweep", type=integers, metavar="1,4,16,64", help="closed loops, one after the other"
    )
    group.add_argument("--sweep-requests", type=integers, metavar="4,12,32,64", help="requests of each")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warmup", type=integer(0), default=2, help="requests before, not counted (default: 2)"
    )
    group.add_argument(
        "--timeout", type=number(0.001), default=600.0, help="seconds for a request (default: 600)"
    )
    group.add_argument(
        "--idle-check", action="store_true", help="at the end, is every block free? (needs --grpc)"
    )
    group.add_argument(
        "--idle-timeout", type=number(0), default=30.0, help="seconds to become idle (default: 30)"
    )
    group.add_argument(
        "--progress", type=number(0), default=5.0, help="seconds between lines; 0: none (default: 5)"
    )
    group.add_argument("--json", metavar="FILE", help="where to write all figures")


def _checked(values: argparse.Namespace) -> Options:
    if not (values.url or values.grpc):
        raise InputError("give --url or --grpc")
    if values.idle_check and not values.grpc:
        raise InputError("--idle-check needs --grpc")
    if values.extra_body and not values.url:
        raise InputError("--extra-body needs --url")
    synthetic = values.synthetic
    if not (values.lengths or values.trace or synthetic):
        synthetic = Lengths(128, 64)
    kind = values.arrival or ("trace" if values.trace else "all")
    if kind in ("poisson", "constant") and values.rate is None:
        raise InputError(f"--arrival {kind} needs --rate")
    return Options(
        url=values.url,
        grpc=values.grpc,
        api=values.api,
        model=values.model,
        temperature=values.temperature,
        extra=values.extra_body,
        source=LengthSource(values.lengths, values.trace, synthetic, values.max_total),
        arrival=ArrivalSpec(kind, values.rate),
        points=_points(values),
        vocab=values.vocab,
        seed=values.seed,
        warmup=values.warmup,
        timeout=values.timeout,
        idle_check=values.idle_check,
        idle_timeout=values.idle_timeout,
        progress=values.progress,
        json=values.json,
    )


def _points(values: argparse.Namespace) -> list[Point]:
    closed = values.clients is not None or values.sweep is not None
    if closed and (values.arrival or values.rate):
        raise InputError("--clients and --sweep are closed loops: --arrival and --rate do not apply")
    if values.sweep is None:
        if values.sweep_requests:
            raise InputError("--sweep-requests needs --sweep")
        return [Point(values.requests, values.clients)]
    counts = values.sweep_requests or [values.requests] * len(values.sweep)
    if values.clients is not None or len(counts) != len(values.sweep):
        raise InputError("--sweep takes no --clients, and as many --sweep-requests as client counts")
    return [Point(count, clients) for count, clients in zip(counts, values.sweep, strict=True)]


def add_closed_loops(parser: argparse.ArgumentParser) -> None:
    """Closed loops one after the other, for `closed_loops` and `length_source`."""
    parser.add_argument("--sweep", type=integers, default=[1, 4, 16, 64], metavar="1,4,16,64")
    parser.add_argument(
        "--sweep-requests", type=integers, default=[16, 16, 32, 64], metavar="16,16,32,64"
    )
    add_lengths(parser)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """For `length_source`, and the seed of what it gives."""
    parser.add_argument("--lengths", metavar="CSV", help="prompt_tokens,output_tokens; else 128,64")
    parser.add_argument("--max-total", type=integer(2), help="keep prompt + output <= N tokens")
    parser.add_argument("--seed", type=integer(0), default=0, help="of lengths and prompts")


def closed_loops(values: argparse.Namespace) -> list[Point]:
    """Raises InputError."""
    if len(values.sweep) != len(values.sweep_requests):
        raise InputError("--sweep-requests: as many as there are client counts in --sweep")
    pairs = zip(values.sweep_requests, values.sweep, strict=True)
    return [Point(requests, clients) for requests, clients in pairs]


def length_source(values: argparse.Namespace) -> LengthSource:
    """Lengths from the file, or the same for all requests."""
    synthetic = None if values.lengths else Lengths(128, 64)
    return LengthSource(values.lengths, None, synthetic, values.max_total)


def integer(minimum: int) -> Callable[[str], int]:
    """A reader of an option's value, for argparse; `number` and `integers` likewise."""

    def read(text: str) -> int:
        value = _as_int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is below the minimum of {minimum}")
        return value

    return read


def number(minimum: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least {minimum:g}")
        return value

    return read


def integers(text: str) -> list[int]:
    return [integer(1)(part) for part in text.split(",")]


def _pair(text: str) -> Lengths:
    values = integers(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two integers such as 128,64")
    return Lengths(*values)


def _as_int(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
