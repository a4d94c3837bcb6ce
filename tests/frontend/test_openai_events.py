"""The events of OpenAI streams: those written from halves are those that the formatter makes."""

import json
from typing import Any

import pytest
from test_openai_format import chat, completion, scores

from octavo.frontend.openai_events import EventWriter
from octavo.frontend.openai_types import ChatRequest, CompletionRequest
from octavo.frontend.sample import Delta
from octavo.frontend.tokenizer import Vocabulary

TEXTS = ["a", 'say "no"\\n', "\n\t\x00", "😀é", "</script>", "a"]
USAGES = [{}, {"include_usage": True}, {"continuous_usage_stats": True}]


def completion_writer(vocabulary: Vocabulary, **fields: Any) -> EventWriter:
    body = json.dumps({"model": "m", "prompt": "ab", "stream": True, **fields}).encode()
    return EventWriter(completion(vocabulary, **fields), CompletionRequest.read(body))


def chat_writer(vocabulary: Vocabulary, **fields: Any) -> EventWriter:
    messages = [{"role": "user", "content": ""}]
    body = json.dumps({"model": "m", "messages": messages, "stream": True, **fields}).encode()
    return EventWriter(chat(vocabulary, **fields), ChatRequest.read(body))


def read(written: bytes) -> list[dict[str, Any]]:
    """The bodies of events."""
    *events, rest = written.decode().split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("options", USAGES)
def test_all_events_of_a_completion_have_the_first_one_s_shape(
    byte_vocabulary: Vocabulary, options: dict[str, bool]
) -> None:
    writer = completion_writer(byte_vocabulary, n=2, stream=True, stream_options=options)
    for stream, index in ((1, 1), (0, 0), (1, 0)):
        written = [writer.events([(stream, Delta(index, text, [97], []))]) for text in TEXTS]
        assert written[-1] == written[0]
        bodies = [body for one in written for body in read(one)]
        assert [body["choices"][0]["text"] for body in bodies] == TEXTS
        assert {body["choices"][0]["index"] for body in bodies} == {2 * stream + index}
        assert all(body | {"choices": []} == bodies[0] | {"choices": []} for body in bodies)


@pytest.mark.parametrize("options", USAGES)
def test_all_events_of_a_chat_have_the_first_one_s_shape(
    byte_vocabulary: Vocabulary, options: dict[str, bool]
) -> None:
    writer = chat_writer(byte_vocabulary, stream=True, stream_options=options)
    written = [writer.events([(0, Delta(0, text, [97], []))]) for text in TEXTS]
    role, first = written[0].split(b"\n\n")[:2]
    assert read(role + b"\n\n")[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert written[-1] == first + b"\n\n"
    choices = [body["choices"][0] for one in written for body in read(one)]
    assert [choice["delta"]["content"] for choice in choices] == ["", *TEXTS]
    assert all(choice["finish_reason"] is None for choice in choices)


def test_a_choice_s_last_event_says_why_it_ended(byte_vocabulary: Vocabulary) -> None:
    writer = completion_writer(byte_vocabulary)
    deltas = [Delta(0, "a", [97], []), Delta(0, "b", [98], []), Delta(0, "c", [99], [], "stop", 120)]
    bodies = read(writer.events([(0, delta) for delta in deltas]))
    ends = [(body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) for body in bodies]
    assert ends == [(None, None), (None, None), ("stop", 120)]


def test_deltas_without_text_make_no_events(byte_vocabulary: Vocabulary) -> None:
    writer = completion_writer(byte_vocabulary)
    nothing = (0, Delta(0, "", [0xF0], []))
    assert writer.events([nothing]) == b""
    assert len(read(writer.events([(0, Delta(0, "a", [97], [])), nothing]))) == 1
    assert writer.events([nothing]) == b""


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"return_token_ids": True}])
def test_what_comes_with_each_token_is_in_each_event(
    byte_vocabulary: Vocabulary, asked: dict[str, Any]
) -> None:
    writer = completion_writer(byte_vocabulary, **asked)
    news = [(0, Delta(0, char, [ord(char)], scores(char.encode()))) for char in "abc"]
    choices = [body["choices"][0] for body in read(writer.events(news))]
    if "logprobs" in asked:
        assert [choice["logprobs"]["tokens"] for choice in choices] == [["a"], ["b"], ["c"]]
    else:
        assert [choice["token_ids"] for choice in choices] == [[97], [98], [99]]


def test_usage_is_told_once_or_with_every_event(byte_vocabulary: Vocabulary) -> None:
    counts = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    for options, running in (({"include_usage": True}, None), ({"continuous_usage_stats": True}, 10)):
        writer = completion_writer(byte_vocabulary, stream=True, stream_options=options)
        bodies = read(writer.events([(0, Delta(0, char, [97], [])) for char in "ab"]))
        assert [(body["usage"] or {}).get("total_tokens") for body in bodies] == [running] * 2
        *usage, done = writer.end().split(b"\n\n")[:-1]
        assert done == b"data: [DONE]"
        for event in usage:
            assert read(event + b"\n\n")[0]["usage"].items() >= counts.items()
        assert len(usage) == bool(options.get("include_usage"))
