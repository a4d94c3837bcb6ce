"""Kinds of fault that servers like this one have had, against the running service.

Two oracles: the same request alone, without pressure, gives the same answer; and the deltas of a
stream, put together, equal the whole answer.
"""

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from asking import Answer, collect, request, stream, whole
from reference_model import reference_logprobs
from service import Service, wait_for
from shared_files import golden

from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

EOS = 2  # <|im_end|>
TEXT = "Once upon a time, in a small village by the sea,"


@pytest.fixture(scope="module")
def stub(service: Service) -> Iterator[Any]:
    with grpc.insecure_channel(service.target) as channel:
        yield pb_grpc.GenerationStub(channel)


@pytest.fixture(autouse=True)
def idle_afterwards(service: Service) -> Iterator[None]:
    """Whatever a test does, every block is free when it is over, and the worker holds no slot."""
    yield
    service.wait_until_idle()
    wait_for(lambda: service.worker_metrics()["octavo_worker_live_slots"] == 0, "no slot is held", 10)


# -- preemption by recomputation --------------------------------------------------------------------


def test_recomputation_loses_and_repeats_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Eight golden streams in a pool for about two: many preemptions, the same tokens and usage."""
    lines = golden("greedy")[:8]
    options: dict[str, object] = {
        "num_kv_blocks": 26,
        "block_size": 8,
        "prefill_chunk": 16,
        "preemption": "recompute",
    }
    with Service(tmp_path_factory.mktemp("pressure") / "log", options) as small:
        with grpc.insecure_channel(small.target) as channel, ThreadPoolExecutor(8) as pool:
            stub = pb_grpc.GenerationStub(channel)
            answers = list(pool.map(lambda line: stream(stub, golden_request(line)), lines))
        assert small.metrics()['octavo_preemptions_total{kind="recompute"}'] >= 5
        small.wait_until_idle()
    for line, answer in zip(lines, answers, strict=True):
        assert answer.samples[0].token_ids == line["output_token_ids"]
        logprobs = [entry.logprob for entry in answer.samples[0].logprobs]
        assert logprobs == pytest.approx(line["logprobs"], abs=1e-3)
        assert answer.counts == (len(line["prompt_token_ids"]), 0, len(line["output_token_ids"]))


def golden_request(line: dict[str, Any]) -> Any:
    return request(
        line["prompt_token_ids"],
        temperature=0.0,
        max_tokens=len(line["output_token_ids"]),
        logprobs=0,
    )


# -- the client is gone -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Four slots and small chunks: prompts take many plans, and a queue forms at once."""
    options: dict[str, object] = {"max_num_seqs": 4, "prefill_chunk": 16, "max_model_len": 2048}
    with Service(tmp_path_factory.mktemp("narrow") / "log", options) as running:
        yield running


LONG = [100 + index % 1000 for index in range(1500)]


class Call:
    """A request that is given up: over gRPC by a cancel, over HTTP by closing the connection."""

    def __init__(
        self, service: Service, protocol: str, streamed: bool, prompt: list[int], n: int
    ) -> None:
        self._open = self._open_grpc if protocol == "grpc" else self._open_http
        self.drop: Callable[[], None] = lambda: None
        self._open(service, streamed, prompt, n)

    def _open_grpc(self, service: Service, streamed: bool, prompt: list[int], n: int) -> None:
        channel = grpc.insecure_channel(service.target)
        stub = pb_grpc.GenerationStub(channel)
        message = request(prompt, max_tokens=400, ignore_eos=True, n=n)
        call = stub.Generate(message) if streamed else stub.GenerateUnary.future(message)

        def drop() -> None:
            call.cancel()
            call.cancel()
            channel.close()

        self.drop = drop

    def _open_http(self, service: Service, streamed: bool, prompt: list[int], n: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.http_port)
        body = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": prompt,
            "max_tokens": 400,
            "ignore_eos": True,
            "n": n,
            "stream": streamed,
        }
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)

        def drop() -> None:
            assert connection.sock is not None
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

        self.drop = drop


def groups(service: Service) -> dict[str, int]:
    metrics = service.metrics()
    states = ("waiting", "running", "preempted")
    return {state: int(metrics[f'octavo_sequence_groups{{state="{state}"}}']) for state in states}


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "decode-n3"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_that_leaves_frees_its_blocks(
    narrow: Service, protocol: str, streamed: bool, phase: str
) -> None:
    freed_before = narrow.metrics()["octavo_cancels_freed_total"]
    others = []
    if phase == "queued":
        others = [Call(narrow, "grpc", True, LONG[:50], n=4)]
        wait_for(lambda: groups(narrow)["running"] == 1, "the slots are taken", 30)
    prompt = LONG if phase == "prefill" else LONG[:20]
    prefilled = 'octavo_scheduled_tokens_total{kind="decode"}'
    decoded_before = narrow.metrics()[prefilled]
    call = Call(narrow, protocol, streamed, prompt, n=3 if phase == "decode-n3" else 1)
    state = "waiting" if phase == "queued" else "running"
    wait_for(lambda: groups(narrow)[state] == 1, f"the request is {state}", 30)
    if phase.startswith("decode"):
        wait_for(lambda: narrow.metrics()[prefilled] > decoded_before + 3, "it decodes", 30)
    call.drop()
    wait_for(
        lambda: groups(narrow)[state] == (0 if state == "waiting" else len(others)), "it is gone", 10
    )
    for other in others:
        other.drop()
    narrow.wait_until_idle()
    freed = "octavo_cancels_freed_total"
    wait_for(lambda: narrow.metrics()[freed] == freed_before + 1, "its slots are freed", 10)
    assert narrow.metrics()["octavo_cancel_to_free_plans_max"] <= 2
    wait_for(lambda: narrow.worker_metrics()["octavo_worker_live_slots"] == 0, "no slot is held", 10)


def test_many_cancels_leave_nothing(narrow: Service) -> None:
    with grpc.insecure_channel(narrow.target) as channel:
        stub = pb_grpc.GenerationStub(channel)
        for number in range(25):
            call = stub.Generate(request(LONG[:10], max_tokens=100, ignore_eos=True, n=2, seed=number))
            for _ in range(number % 4):
                next(call)
            call.cancel()
    narrow.wait_until_idle()
    assert narrow.metrics()["octavo_cancel_to_free_plans_max"] <= 2


def test_a_deadline_ends_the_request(narrow: Service) -> None:
    with grpc.insecure_channel(narrow.target) as channel:
        stub = pb_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            collect(stub.Generate(request(LONG, max_tokens=400, ignore_eos=True), timeout=1.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    narrow.wait_until_idle()


# -- endings ----------------------------------------------------------------------------------------


def test_min_tokens_and_eos(stub: Any) -> None:
    """An EOS that is sure to win comes right after `min_tokens` others."""
    biased = {"logit_bias": {EOS: 100.0}, "max_tokens": 12}
    for temperature in (0.0, 1.0):
        answer = stream(stub, request(TEXT, min_tokens=4, temperature=temperature, seed=1, **biased))
        tokens = answer.samples[0].token_ids
        assert len(tokens) == 5 and tokens[4] == EOS and EOS not in tokens[:4]
        assert answer.samples[0].finish_reason == "stop"
        assert answer.counts[2] == 5
    ignored = stream(stub, request(TEXT, ignore_eos=True, temperature=0.0, **biased))
    assert ignored.samples[0].token_ids == [EOS] * 12
    assert ignored.samples[0].finish_reason == "length"


def test_min_tokens_masks_every_ending_token(stub: Any) -> None:
    bias = {EOS: 100.0, 665: 60.0, 28: 30.0}
    ends = {"stop_token_ids": [665, 28], "logit_bias": bias, "temperature": 0.0, "max_tokens": 12}
    masked = stream(stub, request(TEXT, min_tokens=3, **ends)).samples[0]
    assert len(masked.token_ids) == 4 and masked.token_ids[3] == EOS
    assert not {EOS, 665, 28} & set(masked.token_ids[:3])
    unbiased_eos = {**ends, "logit_bias": {665: 60.0, 28: 30.0}}
    stopped = stream(stub, request(TEXT, min_tokens=3, **unbiased_eos)).samples[0]
    assert stopped.token_ids[3] == 665 and stopped.stop_reason == "665"


def test_stop_strings_end_where_they_begin(stub: Any) -> None:
    free = whole(stub, request(TEXT, temperature=0.0, max_tokens=30)).samples[0]
    for start, end in ((0, 4), (7, 22), (3, 5), (20, 40)):
        stop = free.text[start:end]
        for ask in (stream, whole):
            answer = ask(stub, request(TEXT, temperature=0.0, max_tokens=30, stop=["zzz", stop]))
            sample = answer.samples[0]
            assert sample.text == free.text[: free.text.index(stop)]
            assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
            assert sample.token_ids == free.token_ids[: len(sample.token_ids)]
            assert answer.counts[2] == len(sample.token_ids)


def test_text_held_back_for_a_stop_is_delivered_at_the_end(stub: Any) -> None:
    free = whole(stub, request(TEXT, temperature=0.0, max_tokens=9)).samples[0]
    near_miss = free.text[-6:] + "never"
    held = stream(stub, request(TEXT, temperature=0.0, max_tokens=9, stop=[near_miss])).samples[0]
    assert (held.text, held.finish_reason) == (free.text, "length")


# -- log-probabilities ------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_reference(stub: Any) -> None:
    message = request(TEXT, temperature=0.8, seed=5, max_tokens=24, logprobs=4, prompt_logprobs=3)
    streamed, unary = stream(stub, message), whole(stub, message)
    assert streamed.values() == unary.values()
    prompt = [entry.token_id for entry in streamed.prompt_logprobs]
    sample = streamed.samples[0]
    reference = reference_logprobs(prompt + sample.token_ids)
    rows = reference[len(prompt) - 1 :]
    for entries in (sample.logprobs, unary.samples[0].logprobs):
        check_entries(entries, rows, sample.token_ids, best=4)
    assert streamed.prompt_logprobs[0].absent
    check_entries(streamed.prompt_logprobs[1:], reference, prompt[1:], best=3)
    assert list(streamed.prompt_logprobs) == list(unary.prompt_logprobs)


def check_entries(entries: Any, rows: Any, tokens: list[int], best: int) -> None:
    assert len(entries) == len(tokens)
    for entry, row, token in zip(entries, rows, tokens, strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        wanted = row.topk(best).values.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo_and_prompt_logprobs(service: Service, max_tokens: int) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=service.base_url, api_key="none", max_retries=0)
    answer = client.completions.create(
        model="SmolLM2-135M-Instruct",
        prompt=TEXT,
        echo=True,
        logprobs=2,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.text.startswith(TEXT) and (choice.text == TEXT) == (max_tokens == 0)
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    scores = choice.logprobs
    assert scores is not None and scores.tokens and scores.token_logprobs and scores.text_offset
    extra: Any = choice
    ids = extra.prompt_token_ids + extra.token_ids
    reference = reference_logprobs(ids)
    wanted = [float(row[token]) for row, token in zip(reference, ids[1:], strict=True)]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    assert "".join(scores.tokens) == choice.text
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


# -- bad requests, tiny temperatures ----------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [49152]}, "49152"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1] * 9000}, "8192"),
    ({"max_tokens": 9000}, "max_tokens"),
    ({"logit_bias": {49152: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"presence_penalty": math.inf}, "presence_penalty"),
    ({"frequency_penalty": 3.0}, "frequency_penalty"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 40}, "stop"),
    ({"stop_token_ids": [50000]}, "stop_token_ids"),
]


def test_bad_requests_get_errors_and_harm_nobody(stub: Any) -> None:
    line = golden("greedy")[0]
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(stream, stub, golden_request(line))
        for fields, named in BAD:
            with pytest.raises(grpc.RpcError) as caught:
                whole(stub, request(**{"prompt": TEXT, "max_tokens": 4, **fields}))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert named in caught.value.details(), (fields, caught.value.details())
        assert good.result().samples[0].token_ids == line["output_token_ids"]


def test_tiny_temperatures_equal_argmax_beside_sampled_rows(stub: Any) -> None:
    lines = golden("greedy")[:6]
    colds = [0.0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-38]
    stop_hot = threading.Event()

    def hot(seed: int) -> None:
        bias = dict.fromkeys(range(50), -100.0)
        while not stop_hot.is_set():
            stream(stub, request(TEXT, temperature=1.5, seed=seed, max_tokens=8, logit_bias=bias))

    def cold(temperature: float, line: dict[str, Any]) -> Answer:
        message = golden_request(line)
        message.sampling.temperature = temperature
        message.sampling.top_p = 1e-6
        message.sampling.max_tokens = 20
        return stream(stub, message)

    with ThreadPoolExecutor(8) as pool:
        sampled = [pool.submit(hot, seed) for seed in (1, 2)]
        answers = list(pool.map(cold, colds, lines))
        stop_hot.set()
        for future in sampled:
            future.result()
    for line, answer in zip(lines, answers, strict=True):
        assert answer.samples[0].token_ids == line["output_token_ids"][:20]
        assert all(np.isfinite(entry.logprob) for entry in answer.samples[0].logprobs)


# -- samples and usage ------------------------------------------------------------------------------


def test_samples_are_different_complete_and_repeatable(stub: Any) -> None:
    message = request(TEXT, n=4, seed=11, temperature=1.0, max_tokens=13, stop_token_ids=[30, 28])
    first, second, unary = stream(stub, message), stream(stub, message), whole(stub, message)
    assert first.values() == second.values() == unary.values()
    assert len(first.samples) == 4
    assert len({tuple(sample.token_ids) for sample in first.samples.values()}) == 4
    for sample in first.samples.values():
        ended = sample.token_ids[-1] in (28, 30, EOS)
        assert sample.finish_reason == ("stop" if ended else "length")
        assert ended or len(sample.token_ids) == 13


@pytest.mark.parametrize("stop", [[], [" the"]], ids=["no-stop", "stop-string"])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_what_was_generated(stub: Any, n: int, stop: list[str]) -> None:
    message = request(TEXT, n=n, seed=3, max_tokens=16, stop=stop)
    prompt_tokens = len(golden("greedy")[0]["prompt_token_ids"])
    for answer in (stream(stub, message), whole(stub, message)):
        generated = sum(len(sample.token_ids) for sample in answer.samples.values())
        assert answer.counts == (prompt_tokens, 0, generated)


def test_a_slow_reader_costs_only_itself(stub: Any) -> None:
    """A stream that is not read goes on, others are as fast, and its text comes whole in the end."""
    message = request(TEXT, temperature=0.0, max_tokens=60)
    slow = stub.Generate(message, timeout=60)
    next(slow)
    line = golden("greedy")[1]
    assert stream(stub, golden_request(line)).samples[0].token_ids == line["output_token_ids"]
    time.sleep(0.5)
    rest = collect(slow)
    assert golden("greedy")[0]["output_text"].startswith(whole(stub, message).samples[0].text[:40])
    assert rest.counts[2] == 60
