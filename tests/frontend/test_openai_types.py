"""Requests of the OpenAI API: what they make, and what is refused."""

import json
from typing import Any

import pytest

from octavo.frontend.errors import RequestError
from octavo.frontend.openai_types import ChatRequest, CompletionRequest
from octavo.frontend.requests import ChatPrompt


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.read(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(content: Any = "hi", **fields: Any) -> ChatRequest:
    message = {"role": "user", "content": content}
    return ChatRequest.read(json.dumps({"model": "m", "messages": [message], **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert [call.prompt for call in completion(prompt=prompt).calls()] == prompts


@pytest.mark.parametrize("prompt", [[], ["x"] * 257, ["a", 1], {"a": 1}, None, [1.5]])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt).calls()
    assert caught.value.field == "prompt"


def test_completion_fields_go_through() -> None:
    request = completion(
        temperature=0.5,
        top_k=5,
        stop="x",
        logit_bias={"7": -1},
        logprobs=2,
        echo=True,
        include_stop_str_in_output=True,
        seed=3,
    )
    call = request.calls()[0]
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.5, 5, ("x",))
    assert (sampling.logit_bias, sampling.seed, sampling.include_stop) == ({7: -1}, 3, True)
    assert (sampling.logprobs, sampling.prompt_logprobs, call.echo) == (2, 2, True)
    assert call.default_max_tokens == 16


@pytest.mark.parametrize(
    ("given", "meant"), [(True, "true"), (False, "false"), ("never", "never"), (None, "false")]
)
def test_beam_search_fields(given: Any, meant: str) -> None:
    fields = {"use_beam_search": True, "n": 4, "length_penalty": 0.5, "early_stopping": given}
    for request in (completion(**fields), chat(**fields)):
        sampling = request.calls()[0].sampling
        assert (sampling.use_beam_search, sampling.n, sampling.length_penalty) == (True, 4, 0.5)
        assert sampling.early_stopping == meant


def test_best_of_n_may_be_streamed() -> None:
    assert completion(stream=True, n=3, best_of=3).calls()[0].sampling.num_samples == 3


def test_null_means_the_default() -> None:
    sampling = completion(temperature=None, n=None, stop=None, seed=None).calls()[0].sampling
    assert (sampling.temperature, sampling.n, sampling.stop, sampling.seed) == (1.0, 1, (), None)


@pytest.mark.parametrize("fields", [{"tools": []}, {"response_format": {"type": "text"}}])
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields, user="u", metadata={"a": "b"}, store=False, parallel_tool_calls=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"suffix": "x"},
        {"reasoning_effort": "low"},
    ],
)
def test_features_that_are_not_offered(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="not offered") as caught:
        completion(**fields)
    assert caught.value.code == "UNIMPLEMENTED"
    assert caught.value.field == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"early_stopping": "true"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"stream": True, "n": 2, "best_of": 3}, "best_of"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields).calls()
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.field == field
    assert field in caught.value.message


def test_a_body_that_is_not_json() -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        CompletionRequest.read(b"{")


def test_chat_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = chat(parts).calls()[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "UNIMPLEMENTED"),
        ([{"type": "text"}], "INVALID_ARGUMENT"),
        (["a"], "INVALID_ARGUMENT"),
        (None, "INVALID_ARGUMENT"),
        (5, "INVALID_ARGUMENT"),
    ],
)
def test_bad_content(content: Any, code: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content") as caught:
        chat(content).calls()
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "tool", "content": "x"}, "UNIMPLEMENTED"),
        ({"role": "wizard", "content": "x"}, "INVALID_ARGUMENT"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "UNIMPLEMENTED"),
        ({"content": "x"}, "INVALID_ARGUMENT"),
    ],
)
def test_bad_messages(message: dict[str, Any], code: str) -> None:
    body = json.dumps({"model": "m", "messages": [message]}).encode()
    with pytest.raises(RequestError) as caught:
        ChatRequest.read(body).calls()
    assert caught.value.code == code


def test_chat_logprobs_and_lengths() -> None:
    call = chat(logprobs=True, top_logprobs=3, max_tokens=5, max_completion_tokens=7).calls()[0]
    assert (call.sampling.logprobs, call.sampling.max_tokens) == (3, 7)
    assert chat(logprobs=True).calls()[0].sampling.logprobs == 0
    assert chat().calls()[0].sampling.logprobs is None
    with pytest.raises(RequestError, match="top_logprobs needs logprobs"):
        chat(top_logprobs=3).calls()
