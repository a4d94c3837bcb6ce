"""The client commands: `octavo generate`, `octavo chat`, `octavo status`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from octavo.common.options import add_options, read_options
from octavo.frontend.client import Client, ClientError, Prompt
from octavo.frontend.options import ClientOptions
from octavo.v1 import generation_pb2 as pb

# -- arguments ------------------------------------------------------------------------------------


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", help="send the text as a chat message")
    kind.add_argument("--raw", action="store_true", help="send the text as it is (the default)")
    _add_sampling_arguments(parser)
    method = parser.add_mutually_exclusive_group()
    method.add_argument("-n", type=int, default=None, help="samples (default: 1)")
    method.add_argument("--beam", type=int, metavar="N", help="beam search of this width")
    parser.add_argument("--best-of", type=int, metavar="M", help="draw M samples and keep the n best")
    parser.add_argument("--logprobs", type=int, help="log-probabilities of this many best tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_options(parser, ClientOptions)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="answer this and end; else read lines from stdin")
    parser.add_argument("--system", help="the system message")
    _add_sampling_arguments(parser)
    add_options(parser, ClientOptions)


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, ClientOptions)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", help="a text at which to stop; may be repeated")


_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "best_of",
    "logprobs",
)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given."""
    given = {name: getattr(args, name, None) for name in _SAMPLING}
    if getattr(args, "beam", None) is not None:
        given.update(use_beam_search=True, n=args.beam)
    return {name: value for name, value in given.items() if value is not None}


# -- what a stream brings ---------------------------------------------------------------------------


@dataclass
class _Sample:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    score: float | None = None  # of a beam search's hypothesis


class _Answer:
    """Collects a stream and times it, in seconds from the start of the call."""

    def __init__(self) -> None:
        self.samples: dict[int, _Sample] = {}
        self.usage = pb.Usage()
        self._start = time.perf_counter()
        self._first: float | None = None
        self._total = 0.0

    def follow(self, deltas: Iterable[pb.GenerateDelta]) -> Iterator[pb.GenerateDelta]:
        """Passes the deltas on."""
        for delta in deltas:
            if self._first is None and delta.token_ids:
                self._first = time.perf_counter() - self._start
            self._add(delta)
            yield delta
        self._total = time.perf_counter() - self._start

    def _add(self, delta: pb.GenerateDelta) -> None:
        sample = self.samples.setdefault(delta.index, _Sample())
        sample.text += delta.text
        sample.token_ids.extend(delta.token_ids)
        sample.logprobs.extend(_score(score) for score in delta.logprobs)
        sample.finish_reason = delta.finish_reason or sample.finish_reason
        if delta.HasField("score"):
            sample.score = delta.score
        if delta.HasField("usage"):
            self.usage = delta.usage

    def timings(self) -> dict[str, float | None]:
        pace = self.usage.completion_tokens / self._total if self._total else 0.0
        return {
            "ttft": None if self._first is None else round(self._first, 6),
            "total": round(self._total, 6),
            "tokens_per_second": round(pace, 3),
        }

    def summary(self) -> str:
        timings = self.timings()
        first = "none" if timings["ttft"] is None else f"{timings['ttft']:.3f} s"
        return (
            f"[TTFT {first}, {timings['tokens_per_second']:.1f} tokens/s, "
            f"{self.usage.completion_tokens} tokens in {timings['total']:.2f} s]"
        )

    def as_json(self) -> dict[str, Any]:
        choices = [self._choice(self.samples[i]) for i in sorted(self.samples)]
        usage = {
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
        }
        body = {**choices[0], "usage": usage, "timings": self.timings()}
        return body if len(choices) == 1 else {**body, "choices": choices}

    def _choice(self, sample: _Sample) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
        }
        if sample.logprobs:
            choice["logprobs"] = sample.logprobs
        if sample.score is not None:
            choice["score"] = sample.score
        return choice


def _score(score: pb.TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": t.token_id, "token": t.token, "logprob": t.logprob} for t in score.top]
    return {"token_id": score.token_id, "token": score.token, "logprob": score.logprob, "top": top}


# -- the commands -----------------------------------------------------------------------------------


def run_generate(args: argparse.Namespace) -> int:
    """Prints the text that follows a prompt. Returns the exit status."""
    prompt: Prompt = [("user", args.prompt)] if args.chat else args.prompt
    return _run(args, lambda client: _generate(client, prompt, args))


def _generate(client: Client, prompt: Prompt, args: argparse.Namespace) -> int:
    answer = _Answer()
    deltas = answer.follow(client.generate(prompt, **_sampling(args)))
    streams = not args.json and (args.n or 1) == 1 and args.beam is None
    for delta in deltas:
        if streams:
            print(delta.text, end="", flush=True)
    if args.json:
        print(json.dumps(answer.as_json(), ensure_ascii=False))
        return 0
    if not streams:
        for i, sample in sorted(answer.samples.items()):
            score = "" if sample.score is None else f" (score {sample.score:.4f})"
            print(f"--- {i}{score}\n{sample.text}")
    print(file=sys.stdout if streams else sys.stderr)
    print(answer.summary(), file=sys.stderr)
    return 0


def run_chat(args: argparse.Namespace) -> int:
    """Answers one message, or talks until the end of stdin. Returns the exit status."""
    return _run(args, lambda client: _chat(client, args))


def _chat(client: Client, args: argparse.Namespace) -> int:
    history = [("system", args.system)] if args.system else []
    if args.message is not None:
        print(_talk(client, [*history, ("user", args.message)], args)[1], file=sys.stderr)
        return 0
    for line in _lines():
        history.append(("user", line))
        text, _ = _talk(client, history, args)
        history.append(("assistant", text))
    return 0


def _lines() -> Iterator[str]:
    """Lines from stdin that are not empty, with a prompt sign where a person types them."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _talk(client: Client, messages: list[tuple[str, str]], args: argparse.Namespace) -> tuple[str, str]:
    """Prints the answer as it comes; returns it with a summary of its timing."""
    answer = _Answer()
    for delta in answer.follow(client.generate(messages, **_sampling(args))):
        print(delta.text, end="", flush=True)
    print()
    return answer.samples[0].text, answer.summary()


def open_client(options: ClientOptions) -> Client:
    """A client of the gateway that the options name. Raises OSError."""
    tls_ca = None if options.tls_ca is None else Path(options.tls_ca)
    return Client(options.target, options.api_key, tls_ca)


def ask(options: ClientOptions, prompt: str, max_tokens: int) -> int:
    """Streams the greedy answer to one chat message to the terminal, then its timing.

    Returns the exit status.
    """
    args = argparse.Namespace(max_tokens=max_tokens, temperature=0.0)
    with open_client(options) as client:
        try:
            _, summary = _talk(client, [("user", prompt)], args)
        except ClientError as error:
            return _complain(error, options.target)
    print(summary)
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Prints the state of the service. Returns the exit status."""
    return _run(args, lambda client: _status(client, args.json))


def _status(client: Client, as_json: bool) -> int:
    model, server, prefixes = client.model_info(), client.server_info(), client.list_prefixes()
    if as_json:
        state = {"model": _as_dict(model), "server": _as_dict(server)}
        print(json.dumps({**state, **_as_dict(prefixes)}))
        return 0
    print(f"Octavo {server.version}: {'ready' if server.ready else 'NOT READY'}")
    print(f"model  {model.name} ({model.family}), {model.max_model_len} tokens of context")
    print(f"queue  {server.waiting} waiting, {server.preempted} preempted, {server.running} running")
    if not server.gangs:
        print("gangs  none: no worker has registered")
        return 0
    for rows in (_gang_rows(server), _pool_rows(server), _prefix_rows(prefixes)):
        if len(rows) > 1:
            print()
            _print_table(rows)
    return 0


def _as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _gang_rows(server: pb.GetServerInfoReply) -> list[list[str]]:
    rows = [["gang", "state", "ranks", "epoch", "engine", "running", "plans", "block size"]]
    for gang in server.gangs:
        rows.append(
            [
                str(gang.gang),
                "ready" if gang.ready else "not ready",
                str(gang.size),
                str(gang.epoch),
                f"{gang.engine} on {gang.device}",
                str(gang.running),
                str(gang.plans),
                f"{gang.block_size} tokens",
            ]
        )
    return rows


def _pool_rows(server: pb.GetServerInfoReply) -> list[list[str]]:
    """Blocks of each gang's two pools; used + cached + free + pinned = blocks."""
    rows = [["gang", "pool", "blocks", "used", "cached", "free", "pinned"]]
    for gang in server.gangs:
        for name, pool in (("device", gang.device_pool), ("cpu", gang.swap_pool)):
            counts = (
                pool.total_blocks,
                pool.used_blocks,
                pool.cached_blocks,
                pool.free_blocks,
                pool.pinned_blocks,
            )
            rows.append([str(gang.gang), name, *map(str, counts)])
    return rows


def _prefix_rows(prefixes: pb.ListPrefixesReply) -> list[list[str]]:
    rows = [["prefix", "tokens", "blocks"]]
    for prefix in prefixes.prefixes:
        rows.append([prefix.name, str(prefix.pinned_tokens), str(prefix.pinned_blocks)])
    return rows


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _run(args: argparse.Namespace, command: Callable[[Client], int]) -> int:
    options = read_options(ClientOptions, args)
    target = options.target
    try:
        opened = open_client(options)
    except OSError as error:
        print(f"--tls-ca: {options.tls_ca} cannot be read ({error.strerror})", file=sys.stderr)
        return 1
    with opened as client:
        try:
            return command(client)
        except ClientError as error:
            return _complain(error, target)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130


def _complain(error: ClientError, target: str) -> int:
    if error.is_unreachable:
        print(
            f"no Octavo service answers at {target}: start one with `octavo serve`, or name another "
            "with --grpc-host and --grpc-port (one that speaks TLS needs --tls-ca)",
            file=sys.stderr,
        )
    else:
        print(f"{error.code}: {error.message}", file=sys.stderr)
    return 1
