"""What is counted without a parse is what a parse would count."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loadgen.completion import CompletionStream
from loadgen.records import Record, RequestError
from loadgen.repeats import Repeats, text_of


def completion(text: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def chat(text: Any, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text, **more}, "finish_reason": None}], "usage": None}


USAGE = {"prompt_tokens": 3, "completion_tokens": 4}
TWO = {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}
EVENTS = [
    b"[DONE]",
    b'{"choices": [{"text": "bad \\q escape"}]}',
    b'{"choices": [{"text": "a", "text": "b"}]}',
    b'{"choices": [{"text": "\xff"}]}',
    b'{"id": "c", "choices": [{"index": 0, "text": "raw \x01", "finish_reason": null}]}',
    *(
        json.dumps(event).encode()
        for event in (
            completion("a", token_ids=[5]),
            completion("a", token_ids=[5, 6]),
            completion("a", finish_reason="stop"),
            completion("a", nested={"text": "b"}),
            {**completion("a"), "usage": USAGE},
            {**completion("a"), "error": {"message": "broken"}},
            {"text": "b", **completion("a")},
            chat("", role="assistant"),
            chat("a", reasoning_content="b"),
            chat(None, reasoning_content="b"),
            chat(None, tool_calls=[]),
            TWO,
            {"choices": [], "usage": USAGE},
            {"error": {"message": "broken"}},
        )
    ),
]
TEXTS = st.one_of(st.sampled_from(["", "a", '"', "\\", "\n", '"text":"', "é", "😀"]), st.text())
LIKE_EVENTS = st.builds(
    lambda make, text, is_ascii: json.dumps(make(text), ensure_ascii=is_ascii).encode(
        errors="surrogatepass"
    ),
    st.sampled_from([completion, chat]),
    TEXTS,
    st.booleans(),
)


def feed(stream: CompletionStream, event: bytes, now: float) -> str:
    """How the event failed, if it did."""
    try:
        stream.feed(b"data: " + event + b"\n\n", now)
    except RequestError as error:
        return str(error)
    return ""


def has_finished(stream: CompletionStream) -> bool:
    try:
        stream.check_end()
    except RequestError:
        return False
    return True


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.one_of(LIKE_EVENTS, LIKE_EVENTS, st.sampled_from(EVENTS)), max_size=20))
def test_a_stream_records_what_whole_parses_record(events: list[bytes]) -> None:
    record, expected = Record(1, 1, 0.0), Record(1, 1, 0.0)
    stream, was_finished = CompletionStream(record), False
    for now, event in enumerate(events):
        fresh = CompletionStream(expected)  # it has no earlier event to compare with
        assert feed(stream, event, float(now)) == feed(fresh, event, float(now))
        was_finished = was_finished or has_finished(fresh)
        assert has_finished(stream) == was_finished
    assert record == expected


def test_usage_that_comes_again_counts_again() -> None:
    record = Record(1, 1, 0.0)
    stream = CompletionStream(record)
    counts = [{**USAGE, "completion_tokens": tokens} for tokens in (1, 2, 1)]
    for usage, event in zip(counts, (completion("a"), {"choices": []}, completion("b")), strict=True):
        feed(stream, json.dumps({**event, "usage": usage}).encode(), 0.0)
    assert (record.seen_tokens, record.output_tokens) == (2, 1)


MODEL = json.dumps(completion("a")).encode()


def learned(*models: bytes) -> Repeats:
    repeats = Repeats()
    for model in models:
        repeats.learn(model, text_of(json.loads(model)["choices"][0]))
    return repeats


@pytest.mark.parametrize("text", [" the", "\\n", '\\"', "\\u00e9", "é", "😀", "{}"])
def test_an_event_with_another_text_repeats(text: str) -> None:
    assert learned(MODEL).has(MODEL.replace(b'"a"', f'"{text}"'.encode()))


@pytest.mark.parametrize(
    "text", [b"", b"\\", b"\\q", b"\\u00g0", b"\t", b"\xff", b'a", "finish_reason": "stop', b'"']
)
def test_what_is_not_one_string_does_not_repeat(text: bytes) -> None:
    assert not learned(MODEL).has(MODEL.replace(b'"a"', b'"' + text + b'"'))


@pytest.mark.parametrize("model", [chat("a"), chat(None, reasoning_content="a"), chat("a", role="x")])
def test_an_event_of_a_chat_repeats(model: dict[str, Any]) -> None:
    event = json.dumps(model, separators=(",", ":")).encode()
    assert learned(event).has(event.replace(b'"a"', b'"b"'))


def test_nothing_repeats_before_an_event_is_learned() -> None:
    assert not Repeats().has(b'"a"')
    assert not Repeats().has(MODEL)


def test_a_string_that_is_not_the_text_is_not_learned() -> None:
    model = json.dumps({"content": "b", **completion("a")}).encode()
    assert not learned(model).has(model)


def test_events_that_never_repeat_are_no_longer_learned() -> None:
    models = [json.dumps({"at": at, **completion("a")}).encode() for at in range(100)]
    assert learned(models[0]).has(models[0])
    assert not learned(*models).has(models[-1])
    repeats = Repeats()
    for model in models:
        repeats.learn(model, "a")
        assert repeats.has(model)  # one that is found again may always be replaced
