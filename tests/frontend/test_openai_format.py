"""Answers of the OpenAI API, on tokens that are single bytes."""

import json
from typing import Any

import pytest

from octavo.frontend.errors import HTTP_STATUS, RequestError
from octavo.frontend.openai_format import ChatFormatter, CompletionFormatter, error_body
from octavo.frontend.openai_types import ChatRequest, CompletionRequest
from octavo.frontend.requests import Usage
from octavo.frontend.sample import Delta, TokenScore
from octavo.frontend.tokenizer import Tokenizer, Vocabulary

EMOJI = "😀".encode()


class Words(Tokenizer):
    """A tokenizer with a vocabulary and no encoder."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary


class Told:
    """What a stream tells of itself."""

    prompt_ids = (97, 98)
    prompt_scores = (TokenScore(97, None, (), 0), TokenScore(98, -1.5, ((99, -0.5),), 1))

    def usage(self) -> Usage:
        return Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3)

    def is_stop_token(self, token: int) -> bool:
        return token == 120


def completion(vocabulary: Vocabulary, **fields: Any) -> CompletionFormatter:
    body = json.dumps({"model": "m", "prompt": "ab", **fields}).encode()
    streams: Any = [Told(), Told()]
    return CompletionFormatter(CompletionRequest.read(body), Words(vocabulary), streams)


def chat(vocabulary: Vocabulary, **fields: Any) -> ChatFormatter:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": ""}], **fields})
    streams: Any = [Told()]
    return ChatFormatter(ChatRequest.read(body.encode()), Words(vocabulary), streams)


def scores(data: bytes, offset: int = 0) -> list[TokenScore]:
    return [TokenScore(byte, -1.0, ((byte, -1.0), (33, -2.0)), offset) for byte in data]


def test_pieces_of_characters_are_written_as_bytes(byte_vocabulary: Vocabulary) -> None:
    delta = Delta(0, "😀", list(EMOJI), scores(EMOJI), "length")
    answer = completion(byte_vocabulary, logprobs=2).answer([(0, delta)])
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xf0": -1.0, "!": -2.0}
    entry = chat(byte_vocabulary, logprobs=True).answer([(0, delta)])["choices"][0]["logprobs"]
    assert [score["bytes"] for score in entry["content"]] == [[byte] for byte in EMOJI]


def test_echo_puts_the_prompt_s_scores_first(byte_vocabulary: Vocabulary) -> None:
    formatter = completion(byte_vocabulary, logprobs=1, echo=True)
    logprobs = formatter.answer([(0, Delta(0, "abc", [99], scores(b"c", 2), "length"))])
    logprobs = logprobs["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -1.5, -1.0]
    assert logprobs["top_logprobs"][:2] == [None, {"c": -0.5, "b": -1.5}]
    assert logprobs["text_offset"] == [0, 1, 2]


def test_choices_of_several_prompts_are_prompt_major(byte_vocabulary: Vocabulary) -> None:
    formatter = completion(byte_vocabulary, n=2)
    deltas = [(s, Delta(i, f"{s}{i}", [48], [], "length")) for i in (1, 0) for s in (1, 0)]
    answer = formatter.answer(deltas)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "00"),
        (1, "01"),
        (2, "10"),
        (3, "11"),
    ]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_delta_without_text_makes_no_event(byte_vocabulary: Vocabulary) -> None:
    nothing = Delta(0, "", [0xF0], [])
    assert completion(byte_vocabulary).chunks(0, nothing) == []
    assert len(completion(byte_vocabulary, return_token_ids=True).chunks(0, nothing)) == 1


def test_chat_stream_begins_with_the_role_once(byte_vocabulary: Vocabulary) -> None:
    formatter = chat(byte_vocabulary)
    events = formatter.chunks(0, Delta(0, "a", [97], []))
    events += formatter.chunks(0, Delta(0, "", [2], [], "stop", 2))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("reason", "shown"), [(2, None), (120, 120), ("END", "END"), (None, None)])
def test_stop_reason_is_null_for_eos(byte_vocabulary: Vocabulary, reason: Any, shown: Any) -> None:
    answer = completion(byte_vocabulary).answer([(0, Delta(0, "a", [97], [], "stop", reason))])
    assert answer["choices"][0]["stop_reason"] == shown


@pytest.mark.parametrize(("score", "shown"), [(-0.5, -0.5), (float("-inf"), None)])
def test_a_hypothesis_s_score_is_in_its_choice(
    byte_vocabulary: Vocabulary, score: float, shown: float | None
) -> None:
    delta = Delta(0, "a", [97], [], "length", None, score)
    for formatter in (completion(byte_vocabulary), chat(byte_vocabulary)):
        assert formatter.answer([(0, delta)])["choices"][0]["score"] == shown
        assert formatter.chunks(0, delta)[-1]["choices"][0]["score"] == shown


def test_other_choices_have_no_score(byte_vocabulary: Vocabulary) -> None:
    answer = completion(byte_vocabulary).answer([(0, Delta(0, "a", [97], [], "length"))])
    assert "score" not in answer["choices"][0]


@pytest.mark.parametrize("code", sorted(HTTP_STATUS))
def test_errors_have_openai_s_shape(code: str) -> None:
    error = RequestError(code, "what", "field")
    assert set(error_body(error)["error"]) == {"message", "type", "param", "code"}
    assert 400 <= error.http_status < 600


def test_an_unknown_code_is_internal() -> None:
    assert RequestError("WEIRD", "x").http_status == 500
