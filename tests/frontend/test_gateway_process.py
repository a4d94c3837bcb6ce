"""The real gateway process, with the control plane's side driven by the test."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import grpc
import pytest
from gateway_scene import (
    MODEL,
    NOT_SERVING,
    SERVING,
    Process,
    Scene,
    incarnations,
    play,
    read,
    text,
)
from plane_driver import WAIT

from octavo.frontend.tokenizer import Tokenizer
from octavo.proto.plan import Beams
from octavo.proto.session import (
    Cancel,
    Hello,
    Pin,
    Pins,
    PinsQuery,
    PinState,
    Submit,
    Unpin,
    Welcome,
)
from octavo.v1 import generation_pb2 as pb


def test_health_follows_the_control_plane(gateway: Process) -> None:
    async def test(s: Scene) -> None:
        await s.driver.expect(Hello)
        await s.until_status(NOT_SERVING)
        assert (await s.http("/ready"))[0] == 503
        assert (await s.http("/health"))[0] == 200
        await s.driver.send(Welcome(controlplane=s.driver.incarnation, ready=True))
        await s.until_status(SERVING)
        assert (await s.http("/ready"))[0] == 200
        await s.driver.send(Welcome(controlplane=s.driver.incarnation, ready=False))
        await s.until_status(NOT_SERVING)
        await s.driver.send(Welcome(controlplane=s.driver.incarnation, ready=True))
        await s.until_status(SERVING)
        s.driver.socket.close()
        await s.until_status(NOT_SERVING)

    play(gateway, test)


def test_streams_go_on_when_the_control_plane_is_replaced(
    gateway: Process, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("The quick brown fox — 東京 😀 — jumps over the lazy dog.")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=len(ids), ignore_eos=True)))
        first = await s.driver.expect(Submit)
        await s.driver.tokens(first, 0, 0, ids[:5])
        await s.driver.tokens(first, 0, 3, ids[3:9])  # overlaps what was sent
        await s.new_control_plane(next(incarnations))
        await s.driver.welcome()
        second = await s.driver.expect(Submit)
        have = second.samples[0].tokens.tolist()
        assert (second.request, second.attempt) == (first.request, 1)
        assert second.sampling.seed == first.sampling.seed
        assert have == ids[: len(have)]
        await s.driver.tokens(second, 0, len(have), ids[len(have) :])
        await s.driver.finish(second, 0)
        deltas = await reading
        assert [token for delta in deltas for token in delta.token_ids] == ids
        assert text(deltas) == tokenizer.decode(ids)
        assert deltas[-1].usage.completion_tokens == len(ids)

    play(gateway, test)


def test_a_stop_string_is_cancelled_and_cut_off(gateway: Process, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" one two three four")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        reading = asyncio.ensure_future(read(s.generate(max_tokens=50, stop=["o three"])))
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, ids)
        assert (await s.driver.expect(Cancel)).request == submit.request
        deltas = await reading
        assert text(deltas) == " one tw"
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason == "o three"
        assert deltas[-1].usage.completion_tokens == 3

    play(gateway, test)


def test_beam_search_over_grpc(gateway: Process, tokenizer: Tokenizer) -> None:
    best, second = tokenizer.encode(" one two"), tokenizer.encode(" three")
    asked: dict[str, Any] = {
        "use_beam_search": True,
        "n": 2,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        unary = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**asked))
        calls = (read(s.generate(**asked)), s.stub.GenerateUnary(unary, timeout=WAIT))
        readers = [asyncio.ensure_future(call) for call in calls]
        for _ in readers:
            submit = await s.driver.expect(Submit)
            assert submit.beams == Beams(length_penalty=0.5, early_stopping="never")
            await s.driver.tokens(submit, 1, 0, second)
            await s.driver.finish(submit, 1, "length", -1.25)
            await s.driver.tokens(submit, 0, 0, best)
            await s.driver.finish(submit, 0, "length", -0.5)
        deltas, reply = await asyncio.gather(*readers)
        for answers in (deltas, reply.choices):
            assert [(a.index, a.text, a.score) for a in answers] == [
                (0, " one two", -0.5),
                (1, " three", -1.25),
            ]
        assert deltas[-1].usage.completion_tokens == len(best) + len(second)
        assert reply.usage == deltas[-1].usage

    play(gateway, test)


@pytest.mark.parametrize("stream", [False, True])
def test_beam_search_over_http(gateway: Process, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode(" one two")
    body = {"model": MODEL, "prompt": "hello", "use_beam_search": True, "n": 2, "stream": stream}

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        asking = asyncio.ensure_future(s.http("/v1/completions", body))
        submit = await s.driver.expect(Submit)
        for sample in (0, 1):
            await s.driver.tokens(submit, sample, 0, ids[sample:])
            await s.driver.finish(submit, sample, "length", -0.5 - sample)
        status, events, _ = await asking
        assert status == 200
        answers = [line.removeprefix("data: ") for line in events.splitlines() if line]
        choices = [c for a in answers if a != "[DONE]" for c in json.loads(a)["choices"]]
        assert [(c["index"], c["text"], c["score"]) for c in choices] == [
            (0, " one two", -0.5),
            (1, " two", -1.5),
        ]

    play(gateway, test)


def test_best_of(gateway: Process, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" one two")

    async def test(s: Scene) -> None:
        await s.driver.welcome()
        body = {"model": MODEL, "prompt": "hello", "best_of": 2}
        whole = asyncio.ensure_future(s.http("/v1/completions", body))
        streamed = asyncio.ensure_future(read(s.generate(best_of=2)))
        for _ in (whole, streamed):
            submit = await s.driver.expect(Submit)
            await s.driver.tokens(submit, 0, 0, ids[:1], [-2.0])
            await s.driver.tokens(submit, 1, 0, ids[1:], [-1.0])
            await s.driver.finish(submit, 0)
            await s.driver.finish(submit, 1)
        answer, deltas = json.loads((await whole)[1]), await streamed
        assert [(c["text"], c["logprobs"]) for c in answer["choices"]] == [(" two", None)]
        assert answer["usage"]["completion_tokens"] == 2
        assert [(d.index, d.text, list(d.logprobs)) for d in deltas] == [(0, " two", [])]
        assert deltas[-1].usage.completion_tokens == 2
        status, refusal, _ = await s.http("/v1/completions", {**body, "stream": True})
        assert (status, json.loads(refusal)["error"]["param"]) == (400, "best_of")

    play(gateway, test)


def test_prefixes(gateway: Process, tokenizer: Tokenizer) -> None:
    async def test(s: Scene) -> None:
        await s.driver.welcome()
        await s.until_status(SERVING)
        state = PinState(name="rules", tokens=16, blocks=2)
        asked = pb.RegisterPrefixRequest(name="rules", text="one two three", cache_salt="us")
        asking = s.stub.RegisterPrefix(asked, timeout=WAIT)
        pin = await s.driver.expect(Pin)
        assert pin.tokens.tolist() == tokenizer.encode("one two three")
        assert pin.cache_salt == "us"
        await s.driver.send(Pins(query=pin.query, pins=[state]))
        reply = await asking
        assert (reply.pinned_tokens, reply.pinned_blocks) == (16, 2)
        listing = s.stub.ListPrefixes(pb.ListPrefixesRequest(), timeout=WAIT)
        query = await s.driver.expect(PinsQuery)
        await s.driver.send(Pins(query=query.query, pins=[state]))
        prefixes = (await listing).prefixes
        assert [(p.name, p.pinned_tokens, p.pinned_blocks) for p in prefixes] == [("rules", 16, 2)]
        for code in ("NOT_FOUND", "OK"):
            asking = s.stub.UnregisterPrefix(pb.UnregisterPrefixRequest(name="rules"), timeout=WAIT)
            unpin = await s.driver.expect(Unpin)
            await s.driver.send(Pins(query=unpin.query, code=code, reason="no prefix 'rules'"))
            if code == "OK":
                await asking
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="no prefix 'rules'") as caught:
                    await asking
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    play(gateway, test)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (pb.RegisterPrefixRequest(text="x"), "name must have 1 to 256 characters, got 0"),
        (pb.RegisterPrefixRequest(name="x"), "prompt must be given as text or token_ids"),
        (
            pb.RegisterPrefixRequest(name="x", token_ids=pb.TokenIds()),
            "prompt must have at least 1 token",
        ),
        (pb.RegisterPrefixRequest(name="x", token_ids=pb.TokenIds(ids=[-1])), "prompt has token id -1"),
        (pb.RegisterPrefixRequest(name="x", text="x", cache_salt="s" * 257), "cache_salt must have"),
    ],
)
def test_bad_prefixes(gateway: Process, asked: pb.RegisterPrefixRequest, problem: str) -> None:
    async def test(s: Scene) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
            await s.stub.RegisterPrefix(asked, timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    play(gateway, test)


def test_more_requests_than_the_limit_are_refused_at_once(gateway: Process) -> None:
    async def test(s: Scene) -> None:
        await s.driver.welcome()
        waiting = [s.generate(max_tokens=5) for _ in range(2)]
        readers = [asyncio.ensure_future(read(call)) for call in waiting]
        submits = [await s.driver.expect(Submit) for _ in waiting]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(s.generate(max_tokens=5))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limit of 2 live requests" in str(caught.value.details())
        trailers = dict(caught.value.trailing_metadata() or ())
        assert (trailers["grpc-retry-pushback-ms"], trailers["retry-after"]) == ("1000", "1")
        status, body, headers = await s.http("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        for call in waiting:
            call.cancel()
        cancelled = {(await s.driver.expect(Cancel)).request for _ in waiting}
        assert cancelled == {submit.request for submit in submits}
        await asyncio.gather(*readers, return_exceptions=True)

    play(gateway, test)


def test_the_gateway_loads_no_model_library() -> None:
    code = (
        "import sys, octavo.frontend.gateway, octavo.frontend.commands; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_options_load_no_server_library() -> None:
    code = (
        "import sys, octavo.frontend.options; "
        "sys.exit(bool({'grpc', 'fastapi', 'tokenizers', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
