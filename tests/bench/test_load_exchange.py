"""The HTTP client where the response comes in pieces, breaks off or is not what it should be."""

import asyncio
import socket
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from loadgen.completion import CompletionStream
from loadgen.drive import Run, closed_loop
from loadgen.exchange import Exchange
from loadgen.http_client import HttpClient
from loadgen.records import Record, RequestError
from loadgen.workload import Request
from scripted_server import HEAD, delta, event, run_loop, server, usage

PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"  # until the connection ends
EVENTS = [
    delta("a"),
    delta("b"),
    delta(""),
    delta('"}]}'),
    delta("é\n"),
    delta("c", token_ids=[7, 8]),
    delta("d", finish="length"),
    usage(3, 9),
    b"[DONE]",
]
CHUNKED = HEAD + b"".join(map(event, EVENTS)) + b"0\r\n\r\n"
PLAIN = PLAIN_HEAD + b"".join(event(value).split(b"\r\n", 1)[1][:-2] for value in EVENTS)
EXPECTED = (7, 8, 3, 9, None)  # deltas, tokens seen in them, prompt, output, failure


def found(record: Record) -> tuple[Any, ...]:
    counts = record.seen_tokens, record.prompt_tokens, record.output_tokens
    return len(record.delta_times), *counts, record.failure


async def exchange(pieces: Iterable[bytes]) -> Record:
    """What these pieces and the end of the connection give."""
    record = Record(3, 9, 0.0)
    stream = CompletionStream(record)
    reading = Exchange(stream.feed)
    for piece in pieces:
        reading.data_received(piece)
    reading.connection_lost(None)
    await reading.end()
    stream.check_end()
    return record


@pytest.mark.parametrize("response", [CHUNKED, PLAIN], ids=["chunked", "plain"])
def test_it_does_not_matter_where_a_response_is_cut(response: bytes) -> None:
    async def main() -> None:
        for at in range(len(response) + 1):
            assert found(await exchange([response[:at], response[at:]])) == EXPECTED

    asyncio.run(main())


@pytest.mark.parametrize("response", [CHUNKED, PLAIN], ids=["chunked", "plain"])
def test_a_response_is_read_byte_by_byte_from_a_socket(response: bytes) -> None:
    async def drip(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(response)):
            writer.write(response[at : at + 1])
            await asyncio.sleep(0)

    (record,) = run_loop(drip, 1).records
    assert found(record) == EXPECTED
    assert all(earlier <= later for earlier, later in pairwise(record.delta_times))


def test_events_of_one_piece_came_at_the_same_time() -> None:
    record = asyncio.run(exchange([CHUNKED]))
    assert found(record) == EXPECTED
    assert len(set(record.delta_times)) == 1


def test_what_is_behind_an_error_is_not_counted() -> None:
    async def main() -> Record:
        record = Record(3, 9, 0.0)
        reading = Exchange(CompletionStream(record).feed)
        reading.data_received(HEAD + event(delta("a")) + event({"error": "died"}) + event(delta("b")))
        reading.data_received(event(delta("c")))  # the task that closes has not run yet
        with pytest.raises(RequestError, match="error in stream: died"):
            await reading.end()
        return record

    assert asyncio.run(main()).seen_tokens == 1


ANSWERED = HEAD + event(delta("a"))
REFUSED = b"HTTP/1.1 503 Busy\r\n"
FAILURES = [
    (ANSWERED + event(delta("b"))[:-9], "cut off: "),  # in the middle of an event
    (ANSWERED + b"zz\r\n", "bad response: "),
    (ANSWERED + event({"choices": 5}), "bad response: "),
    (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "bad response: "),
    (REFUSED + b'\r\n{"error": {"message": "later"}}', "http 503: later"),  # until the connection ends
    (REFUSED + b"Content-Length: 90\r\n\r\ncut", "http 503: cut"),
    (
        REFUSED + b"Transfer-Encoding: chunked\r\n\r\n3\r\nnot\r\n4\r\n now\r\n0\r\n\r\n",
        "http 503: not now",
    ),
]


@pytest.mark.parametrize(("response", "failure"), FAILURES)
@pytest.mark.parametrize("size", [7, 10_000])
def test_failures_do_not_depend_on_the_pieces(response: bytes, failure: str, size: int) -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(response), size):
            writer.write(response[at : at + size])
            await asyncio.sleep(0)

    (record,) = run_loop(script, 1).records
    assert isinstance(record.failure, RequestError)
    assert str(record.failure).startswith(failure)


def test_a_refusal_without_end_is_not_read_to_its_end() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 No\r\n\r\n")
        while True:
            writer.write(b"why " * 10_000)
            await writer.drain()

    (record,) = run_loop(script, 1).records
    assert str(record.failure).startswith("http 500: why why")


def test_a_connection_that_is_reset_is_a_failure_of_its_own_kind() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event(delta("a")))
        await asyncio.sleep(0.05)  # a reset discards what has not been read
        no_linger = struct.pack("ii", 1, 0)
        writer.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, no_linger
        )

    (record,) = run_loop(script, 1).records
    assert record.failure is not None and record.failure.kind == "connection"


def test_a_request_that_times_out_closes_its_connection() -> None:
    left = asyncio.Event()

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        try:
            while True:
                writer.write(event(delta("a")))
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            left.set()

    async def main() -> Run:
        run = Run([Request([21], 4, 0.0)])
        async with server(script) as url:
            await closed_loop(HttpClient(url, "completions", "m", 0.0, {}), run, 1, timeout=0.1)
            seen = run.records[0].seen_tokens
            await asyncio.wait_for(left.wait(), 10)
            assert run.records[0].seen_tokens == seen
        return run

    (record,) = asyncio.run(main()).records
    assert record.failure is not None and record.failure.kind == "timeout"
    assert record.seen_tokens > 0


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "bad response: /v1/models: "),
        (
            b'HTTP/1.1 401 No\r\n\r\n{"error": {"message": "no key"}}',
            "http 401: no key",
        ),
    ],
)
def test_a_server_that_does_not_name_its_model_is_a_failure(answer: bytes, failure: str) -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    (record,) = run_loop(script, 1, model=None).records
    assert str(record.failure).startswith(failure)
