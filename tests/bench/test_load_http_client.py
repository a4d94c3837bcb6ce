"""The HTTP client and the loops against a real socket whose other end plays a script."""

import asyncio
from typing import Any

import pytest
from loadgen.drive import Run, closed_loop
from loadgen.http_client import HttpClient
from loadgen.lengths import InputError
from loadgen.records import RequestError
from loadgen.workload import Request
from scripted_server import HEAD, Script, delta, event, run_loop, server, usage


async def four_tokens(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(delta("a")) + event(delta("")))
    await writer.drain()
    writer.write(event(delta("b")) + event(delta("", finish="length")))
    writer.write(event(usage(3, 4)) + event(b"[DONE]") + b"0\r\n\r\n")


def only_failure(run: Run) -> RequestError:
    (record,) = run.records
    assert record.failure is not None
    return record.failure


def test_a_stream_is_recorded() -> None:
    (record,) = run_loop(four_tokens, 1).records
    assert record.failure is None
    assert len(record.delta_times) == 3  # the last event only says why it ended
    assert (record.prompt, record.output, record.cached_tokens) == (3, 4, 2)
    assert record.due <= record.delta_times[0] <= record.ended


def test_the_request_asks_for_exactly_its_tokens() -> None:
    seen: list[dict[str, Any]] = []

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        await four_tokens(request, writer)

    run_loop(script, 1, extra={"top_k": 5})
    assert seen == [
        {
            "line": "POST /v1/completions HTTP/1.1",
            "model": "m",
            "prompt": [21, 22, 23],
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 5,
        }
    ]


def test_token_ids_are_counted_where_there_is_no_usage() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event(delta("a", token_ids=[5, 6])))
        writer.write(event(delta("b", finish="length", token_ids=[7])) + b"0\r\n\r\n")

    (record,) = run_loop(script, 1).records
    assert record.failure is None
    assert (record.output, record.is_short) == (3, True)


def test_chat_sends_words_and_skips_the_role() -> None:
    seen: list[dict[str, Any]] = []

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        for part in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}):
            writer.write((HEAD if len(part) == 2 else b"") + event({"choices": [{"delta": part}]}))
        writer.write(event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + event(b"[DONE]"))

    (record,) = run_loop(script, 1, api="chat").records
    assert record.failure is None and record.output == 2
    assert seen[0]["line"] == "POST /v1/chat/completions HTTP/1.1"
    assert len(seen[0]["messages"][0]["content"].split()) == 3


def test_the_model_is_asked_for_when_not_given() -> None:
    seen: list[dict[str, Any]] = []

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        if request["line"].startswith("GET"):
            body = b'{"data": [{"id": "first"}, {"id": "second"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            await four_tokens(request, writer)

    run = run_loop(script, 2, model=None)
    assert [request["line"].split()[1] for request in seen] == [
        "/v1/models",
        "/v1/completions",
        "/v1/completions",
    ]
    assert seen[1]["model"] == seen[2]["model"] == "first"
    assert all(record.failure is None for record in run.records)


async def refuse(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    body = b'{"error": {"message": "queue is full", "type": "x"}}'
    writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def cut_off(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(delta("a")))


async def hang_up(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Not even a head."""


async def end_without_reason(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(delta("a")) + b"0\r\n\r\n")


async def fail_in_stream(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(delta("a")) + event({"error": {"message": "engine died"}}))


async def nonsense(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(b"{]"))


async def stall(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(delta("a")))
    await writer.drain()
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("script", "kind", "detail"),
    [
        (refuse, "http 429", "queue is full"),
        (cut_off, "cut off", "without a finish reason"),
        (hang_up, "cut off", "without a finish reason"),
        (end_without_reason, "cut off", "without a finish reason"),
        (fail_in_stream, "error in stream", "engine died"),
        (nonsense, "bad response", "{]"),
    ],
)
def test_failures_have_a_kind_and_the_servers_words(script: Script, kind: str, detail: str) -> None:
    failure = only_failure(run_loop(script, 1))
    assert failure.kind == kind
    assert detail in failure.detail


def test_a_stalled_request_times_out() -> None:
    run = run_loop(stall, 1, timeout=0.2)
    assert only_failure(run).kind == "timeout"
    assert run.records[0].seen_tokens == 1


def test_no_server_is_a_failure_of_each_request() -> None:
    async def main() -> Run:
        async with server(four_tokens) as url:
            pass  # closed again: the port is free
        run = Run([Request([21], 1, 0.0)] * 2)
        await closed_loop(HttpClient(url, "completions", "m", 0.0, {}), run, 2, 5.0)
        return run

    kinds = [record.failure.kind for record in asyncio.run(main()).records if record.failure]
    assert kinds == ["connection", "connection"]


class Gate:
    """Answers only when released, and counts how many wait."""

    def __init__(self, release_at: int) -> None:
        self.waiting = 0
        self.most = 0
        self.release_at = release_at
        self.full = asyncio.Event()

    async def __call__(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        if self.waiting >= self.release_at:
            self.full.set()
        await self.full.wait()
        await four_tokens(request, writer)
        self.waiting -= 1


def test_a_closed_loop_keeps_each_client_at_one_request() -> None:
    gate = Gate(release_at=3)
    run = run_loop(gate, 10, clients=3)
    assert gate.most == 3
    assert len(run.records) == 10 and all(record.failure is None for record in run.records)


def test_an_open_loop_sends_whether_others_ended_or_not() -> None:
    gate = Gate(release_at=6)  # nothing ends before all six are there
    requests = [Request([21], 4, at=0.01 * index) for index in range(6)]
    run = run_loop(gate, 6, clients=None, requests=requests)
    assert gate.most == 6
    assert [record.due - run.started for record in run.records] == pytest.approx(
        [request.at for request in requests]
    )
    assert all(record.sent >= record.due and record.failure is None for record in run.records)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(InputError, match="--url"):
        HttpClient(url, "completions", "m", 0.0, {})
