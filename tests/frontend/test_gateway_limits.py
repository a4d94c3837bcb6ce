"""What a gateway bounds, and how it stops: the real process, the control plane's side driven here."""

import asyncio
import json
import random
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzzing import controlplane_messages_to_a_gateway, frames
from gateway_scene import MODEL, NOT_SERVING, Process, Scene, play, read, running_gateway, text
from plane_driver import WAIT

from octavo.frontend.bounded_http import HEADER_SECONDS, MAX_HEADER_BYTES
from octavo.frontend.grpc_api import MAX_RECEIVE_BYTES
from octavo.frontend.http_api import MAX_BODY_BYTES
from octavo.frontend.tokenizer import Tokenizer
from octavo.proto.plan import DrawLogprobs
from octavo.proto.session import Cancel, Submit, Tokens
from octavo.proto.wire import float32s, int32s
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

CONTEXT = 8192
TOP = 20


# -- clients that do not read ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("narrow") / "log"
    with running_gateway(log, "--max-unread-tokens=300") as process:
        yield process


async def pour(s: Scene, submit: Submit, begin: int, count: int) -> None:
    """Tokens with so many log-probabilities that no buffer holds them for long."""
    scores = DrawLogprobs(
        draws=int32s(range(count)),
        logprobs=float32s([-1.0] * count),
        top_counts=int32s([TOP] * count),
        top_ids=int32s(list(range(1000, 1000 + TOP)) * count),
        top_logprobs=float32s([-1.0] * TOP * count),
    )
    await s.driver.send(
        Tokens(
            controlplane=s.driver.incarnation,
            requests=int32s([submit.request] * count),
            attempts=int32s([0] * count),
            samples=int32s([0] * count),
            offsets=int32s(range(begin, begin + count)),
            tokens=int32s([1000] * count),
            logprobs=scores,
        )
    )


async def pour_until_cancelled(s: Scene, submit: Submit) -> int:
    """Returns how many tokens it took."""
    cancelled = asyncio.ensure_future(s.driver.expect(Cancel))
    for begin in range(0, CONTEXT - 200, 50):
        await pour(s, submit, begin, 50)
        await asyncio.sleep(0.005)
        if cancelled.done():
            assert cancelled.result().request == submit.request
            return begin + 50
    raise AssertionError("a client that reads nothing was sent everything")


async def other_stream(s: Scene, ids: list[int]) -> str:
    """A stream beside the unread one, which must not notice."""
    reading = asyncio.ensure_future(read(s.generate(max_tokens=len(ids))))
    submit = await s.driver.expect(Submit)
    await s.driver.tokens(submit, 0, 0, ids)
    await s.driver.finish(submit, 0)
    return text(await reading)


def test_a_grpc_stream_that_is_not_read_is_ended(narrow: Process, tokenizer: Tokenizer) -> None:
    async def test(s: Scene) -> None:
        await s.driver.welcome(CONTEXT)
        small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        target = f"127.0.0.1:{narrow.grpc_port}"
        async with grpc.aio.insecure_channel(target, options=small) as channel:
            sampling = pb.SamplingParams(max_tokens=CONTEXT - 100, logprobs=TOP)
            request = pb.GenerateRequest(text="hello", sampling=sampling)
            unread = pb_grpc.GenerationStub(channel).Generate(request, timeout=WAIT)  # type: ignore[no-untyped-call]
            submit = await s.driver.expect(Submit)
            sent = await pour_until_cancelled(s, submit)
            assert await other_stream(s, tokenizer.encode(" one two")) == " one two"
            got = 0
            with pytest.raises(grpc.aio.AioRpcError, match="max-unread-tokens") as caught:
                async for delta in unread:
                    got += len(delta.token_ids)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < got <= sent - 300

    play(narrow, test)


def test_an_http_stream_that_is_not_read_is_ended(narrow: Process, tokenizer: Tokenizer) -> None:
    async def test(s: Scene) -> None:
        await s.driver.welcome(CONTEXT)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", narrow.http_port))
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
            asked = {**body, "max_tokens": CONTEXT - 100, "logprobs": True, "top_logprobs": TOP}
            client.sendall(post("/v1/chat/completions", json.dumps(asked).encode()))
            submit = await s.driver.expect(Submit)
            await pour_until_cancelled(s, submit)
            assert await other_stream(s, tokenizer.encode(" one two")) == " one two"
            client.settimeout(WAIT)
            answer = await asyncio.to_thread(read_all, client)
        last = answer[answer.rindex(b"data: ") :]
        assert b"max-unread-tokens" in last and b"rate_limit_error" in last
        assert b"[DONE]" not in answer

    play(narrow, test)


def test_much_at_once_is_no_slow_reader(narrow: Process, tokenizer: Tokenizer) -> None:
    """All of a beam search comes in one piece, whatever the limit."""
    ids = tokenizer.encode(" a")[:1] * 250

    async def test(s: Scene) -> None:
        await s.driver.welcome(CONTEXT)
        reading = asyncio.ensure_future(
            read(s.generate(max_tokens=len(ids), n=2, use_beam_search=True))
        )
        submit = await s.driver.expect(Submit)
        for sample in (0, 1):
            await s.driver.tokens(submit, sample, 0, ids)
            await s.driver.finish(submit, sample, "length", -1.0)
        deltas = await reading
        assert sum(len(delta.token_ids) for delta in deltas) == 2 * len(ids)

    play(narrow, test)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *headers)
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def read_all(client: socket.socket) -> bytes:
    data = bytearray()
    while part := client.recv(1 << 16):
        data += part
    return bytes(data)


# -- sizes and pace --------------------------------------------------------------------------------


@pytest.fixture
def awake(gateway: Process) -> Process:
    """A gateway that answers."""

    async def test(s: Scene) -> None:
        await s.status()

    play(gateway, test)
    return gateway


def converse(port: int, *parts: bytes) -> bytes:
    """What a connection answers to these bytes; the answer may come before all were sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT + HEADER_SECONDS) as client:
        try:
            for part in parts:
                client.sendall(part)
            return read_all(client)
        except (BrokenPipeError, ConnectionResetError):
            return b"reset"


def status(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else answer.decode()


def test_bodies_that_are_too_large(awake: Process) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    announced = head + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
    answer = converse(awake.http_port, announced)
    assert status(answer) == "413"
    assert b"limit of 16777216 bytes" in answer and b'"type":"invalid_request_error"' in answer
    part = b"%x\r\n" % (1 << 20) + b"x" * (1 << 20) + b"\r\n"
    parts = [head + b"Transfer-Encoding: chunked\r\n\r\n", *[part] * 17]
    assert status(converse(awake.http_port, *parts)) in ("413", "reset")


def test_headers_that_are_too_large(awake: Process) -> None:
    endless = [b"GET /health HTTP/1.1\r\nX: ", *[b"x" * (256 << 10)] * 16]
    assert status(converse(awake.http_port, *endless)) in ("431", "reset")
    allowed = b"GET /health HTTP/1.1\r\nConnection: close\r\nX: " + b"x" * (MAX_HEADER_BYTES // 2)
    assert status(converse(awake.http_port, allowed + b"\r\n\r\n")) == "200"


@pytest.mark.full
def test_headers_that_do_not_end(awake: Process) -> None:
    assert status(converse(awake.http_port, b"GET /health HTTP/1.1\r\n")) == "408"


def test_a_grpc_message_that_is_too_large(awake: Process) -> None:
    async def test(s: Scene) -> None:
        request = pb.TokenizeRequest(text="x" * (MAX_RECEIVE_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Tokenize(request, timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await s.stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=WAIT)).token_ids

    play(awake, test)


def test_a_long_call_survives_a_client_that_pings_every_second(
    gateway: Process, tokenizer: Tokenizer
) -> None:
    """gRPC's own limits would end the connection after three pings, within some five seconds."""
    ids = tokenizer.encode(" one two")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        eager = [
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),  # as many as it likes
        ]
        target = f"127.0.0.1:{gateway.grpc_port}"
        async with grpc.aio.insecure_channel(target, options=eager) as channel:
            sampling = pb.SamplingParams(max_tokens=len(ids))
            request = pb.GenerateRequest(text="hello", sampling=sampling)
            stub: Any = pb_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            asking = asyncio.ensure_future(_whole(stub, request))
            submit = await s.driver.expect(Submit)
            await asyncio.sleep(7)
            await s.driver.tokens(submit, 0, 0, ids)
            await s.driver.finish(submit, 0)
            assert (await asking).choices[0].text == " one two"

    play(gateway, test)


async def _whole(stub: Any, request: pb.GenerateRequest) -> pb.GenerateReply:
    reply: pb.GenerateReply = await stub.GenerateUnary(request, timeout=WAIT)
    return reply


@pytest.mark.parametrize("count", [2_000, pytest.param(200_000, marks=pytest.mark.full)])
def test_frames_that_are_no_answer(gateway: Process, tokenizer: Tokenizer, count: int) -> None:
    """Mutated frames on the gateway's socket, between the tokens of a stream."""
    ids = tokenizer.encode(" one two three four five six seven eight nine ten")
    rng = random.Random(count)

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=len(ids))))
        submit = await s.driver.expect(Submit)
        real = controlplane_messages_to_a_gateway(s.driver.incarnation + 5000)
        for offset, token in enumerate(ids):
            await s.driver.tokens(submit, 0, offset, [token])
            for parts in frames(rng, real, count // len(ids)):
                await s.driver.send_frame(parts[0])
        await s.driver.finish(submit, 0)
        assert text(await reading) == tokenizer.decode(ids)
        figures = (await s.http("/metrics"))[1]
        refused = re.search(r"^octavo_refused_messages (\S+)$", figures, re.M)
        assert refused is not None and float(refused[1]) > count / 3

    play(gateway, test)


# -- stopping ----------------------------------------------------------------------------------------


def test_a_stopped_gateway_refuses_new_requests_and_lets_streams_finish(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" one two three four")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=len(ids))))
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, ids[:2])
        s.gateway.popen.send_signal(signal.SIGTERM)
        await s.until_status(NOT_SERVING)
        assert (await s.http("/ready"))[0] == 503
        assert (await s.http("/health"))[0] == 200
        with pytest.raises(grpc.aio.AioRpcError, match="stopping") as caught:
            await read(s.generate(max_tokens=5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata() or ())["retry-after"] == "1"
        refused, _, headers = await s.http("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert (refused, headers["Retry-After"]) == (503, "1")
        await s.driver.tokens(submit, 0, 2, ids[2:])
        await s.driver.finish(submit, 0)
        assert text(await reading) == " one two three four"
        assert await asyncio.to_thread(s.gateway.popen.wait, WAIT) == 0

    with running_gateway(tmp_path / "log") as process:
        play(process, test)


def test_streams_that_outlast_the_drain_timeout_end_with_unavailable(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" one two")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=50)))
        submit = await s.driver.expect(Submit)
        body = {"model": MODEL, "prompt": "x", "stream": True}
        http = asyncio.ensure_future(s.http("/v1/completions", body))
        other = await s.driver.expect(Submit)
        for one in (submit, other):
            await s.driver.tokens(one, 0, 0, ids)
        s.gateway.popen.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError, match="stopped before") as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        _, events, _ = await http
        assert "service_unavailable_error" in events and "[DONE]" not in events
        cancelled = {(await s.driver.expect(Cancel)).request for _ in range(2)}
        assert cancelled == {submit.request, other.request}
        assert await asyncio.to_thread(s.gateway.popen.wait, WAIT) == 0

    with running_gateway(tmp_path / "log", "--drain-timeout=1") as process:
        play(process, test)


# -- what the log has --------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_for", [False, True], ids=["by-default", "log-prompts"])
def test_prompts_are_in_the_log_only_if_asked_for(
    tmp_path: Path, tokenizer: Tokenizer, asked_for: bool
) -> None:
    secret, answer = "xylophone", " marmalade"

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        request = pb.GenerateRequest(text=f"the {secret}", sampling=pb.SamplingParams(max_tokens=9))
        asking = asyncio.ensure_future(_whole(s.stub, request))
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, tokenizer.encode(answer))
        await s.driver.finish(submit, 0)
        assert (await asking).choices[0].text == answer
        chat = {"model": MODEL, "messages": [{"role": "user", "content": secret}]}
        bad = ({**chat, "top_p": 7}, {**chat, "messages": secret}, {**chat, secret: 1})
        for body in bad:
            assert (await s.http("/v1/chat/completions", body))[0] == 400
        await s.http(f"/v1/models/{secret}")

    log = tmp_path / "log"
    flags = ["--log-level=debug", *(["--log-prompts"] if asked_for else [])]
    with running_gateway(log, *flags) as process:
        play(process, test)
    said = log.read_text()
    assert "serving gRPC" in said and answer not in said
    assert (f"prompt: 'the {secret}'" in said) == asked_for
    assert said.count(secret) == (1 if asked_for else 0)
