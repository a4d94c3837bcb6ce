"""Streams that are continued: by another call that says what there is already, as by the client."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from asking import Answer, collect, request
from service import Service

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

SAMPLING: dict[str, Any] = {"seed": 11, "temperature": 0.9, "max_tokens": 24, "ignore_eos": True}
PROMPT = "The history of bookbinding begins with"


@pytest.fixture(scope="module")
def stub(service: Service) -> Iterator[Any]:
    with grpc.insecure_channel(service.target) as channel:
        yield pb_grpc.GenerationStub(channel)
        service.wait_until_idle()


def continued(stub: Any, whole: Answer, cuts: list[int], **changes: Any) -> Answer:
    """The answer to a call that has the first tokens of each sample already."""
    message = request(PROMPT, **{**SAMPLING, **changes})
    for index, cut in enumerate(cuts):
        sample = whole.samples[index]
        done = cut >= len(sample.token_ids)
        message.resume.samples.add(
            token_ids=sample.token_ids[:cut], finish_reason=sample.finish_reason if done else ""
        )
    return collect(stub.Generate(message, timeout=120))


@pytest.mark.parametrize("cut", [1, 7, 23])
def test_the_rest_of_a_sample(stub: Any, cut: int) -> None:
    penalties = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    whole = collect(stub.Generate(request(PROMPT, **SAMPLING, **penalties), timeout=120))
    head = continued(stub, whole, [cut], **penalties)
    assert head.samples[0].token_ids == whole.samples[0].token_ids[cut:]
    assert whole.samples[0].text.endswith(head.samples[0].text)
    assert head.samples[0].finish_reason == "length"
    assert head.counts[0] == whole.counts[0] and head.counts[2] == whole.counts[2] == 24


def test_samples_at_different_places(stub: Any) -> None:
    whole = collect(stub.Generate(request(PROMPT, n=3, **SAMPLING), timeout=120))
    rest = continued(stub, whole, [5, 0, 24], n=3)
    assert rest.samples[0].token_ids == whole.samples[0].token_ids[5:]
    assert rest.samples[1].token_ids == whole.samples[1].token_ids
    assert 2 not in rest.samples
    assert rest.counts[2] == whole.counts[2]


def test_a_sample_that_had_its_last_token_gets_its_end(stub: Any) -> None:
    whole = collect(stub.Generate(request(PROMPT, **SAMPLING), timeout=120))
    message = request(PROMPT, **SAMPLING)
    message.resume.samples.add(token_ids=whole.samples[0].token_ids)
    rest = collect(stub.Generate(message, timeout=120))
    assert (rest.samples[0].token_ids, rest.samples[0].finish_reason) == ([], "length")
    assert rest.counts[2] == 24


def test_a_stop_string_that_begins_before_the_cut(stub: Any) -> None:
    whole = collect(stub.Generate(request(PROMPT, **SAMPLING), timeout=120))
    text = whole.samples[0].text
    stop = text[len(text) // 2 - 6 : len(text) // 2 + 6]
    stopped = collect(stub.Generate(request(PROMPT, stop=[stop], **SAMPLING), timeout=120))
    ids = stopped.samples[0].token_ids
    for cut in range(max(1, len(ids) - 4), len(ids) + 1):
        message = request(PROMPT, stop=[stop], **SAMPLING)
        message.resume.samples.add(token_ids=ids[:cut])
        rest = collect(stub.Generate(message, timeout=120)).samples[0]
        assert rest.finish_reason == "stop" and rest.stop_reason == stop
        assert stopped.samples[0].text.endswith(rest.text) and ids[cut:] == rest.token_ids


@pytest.mark.parametrize(
    ("changes", "samples", "named"),
    [
        ({"seed": None}, [[1]], "sampling.seed"),
        ({"n": 2}, [[1]], "n \\(2\\)"),
        ({}, [[49152]], "resume.samples\\[0\\].token_ids"),
        ({}, [[1] * 25], "above max_tokens"),
        ({"best_of": 2}, [[1]], "best_of"),
    ],
)
def test_what_cannot_be_continued(
    stub: Any, changes: dict[str, Any], samples: list[list[int]], named: str
) -> None:
    sampling = {name: value for name, value in {**SAMPLING, **changes}.items() if value is not None}
    message = request(PROMPT, **sampling)
    message.resume.samples.extend(pb.ResumeFrom.Sample(token_ids=ids) for ids in samples)
    with pytest.raises(grpc.RpcError, match=named) as caught:
        collect(stub.Generate(message, timeout=120))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
