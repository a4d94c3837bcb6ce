"""One sample's tokens to deltas: endings, stop strings, offsets."""

import pytest

from octavo.frontend.live import Score
from octavo.frontend.requests import SamplingRequest
from octavo.frontend.sample import Delta, SampleText, TextRules, echo_prompt
from octavo.frontend.tokenizer import Vocabulary

END = 256


def sample(vocabulary: Vocabulary, echo: str = "", **sampling: object) -> SampleText:
    asked = SamplingRequest(**{"logprobs": 0, **sampling})  # type: ignore[arg-type]
    rules = TextRules(vocabulary, asked, frozenset([END]), (), echo)
    return SampleText(0, rules)


def push(text: SampleText, data: bytes) -> bool:
    """Whether the last of these tokens completed a stop string."""
    return [text.push(byte, Score(-1.0)) for byte in data][-1]


def take(text: SampleText) -> Delta:
    delta = text.take()
    assert delta is not None
    return delta


def test_deltas_merge_while_nobody_takes_them(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary)
    assert text.take() is None
    push(text, b"ab")
    push(text, b"c")
    delta = take(text)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", list(b"abc"), "")
    assert text.take() is None
    text.finish("length")
    assert take(text).finish_reason == "length"
    assert text.drained
    assert text.take() is None


def test_an_ending_token_counts_but_is_no_text(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, skip_special_tokens=False)
    push(text, b"ab")
    text.push(END, Score(-1.0))
    text.finish("stop")
    delta = take(text)
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("ab", [97, 98, END], END)
    assert text.count == 3


def test_an_ending_token_is_text_where_asked_for(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, skip_special_tokens=False, include_stop=True)
    text.push(END, None)
    text.finish("stop")
    assert take(text).text == "<end>"


def test_a_stop_string_ends_the_sample(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, stop=["END"])
    assert not push(text, b"abEN")
    assert take(text).text == "ab"
    assert push(text, b"D")
    delta = take(text)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "END")
    assert text.count == 5  # the token that completed it included


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_held_text_comes_with_the_end(byte_vocabulary: Vocabulary, reason: str) -> None:
    text = sample(byte_vocabulary, stop=["abcd"])
    push(text, b"xabc")
    assert take(text).text == "x"
    if reason == "stop":
        text.push(END, None)
    text.finish(reason)
    delta = take(text)
    assert (delta.text, delta.finish_reason) == ("abc", reason)


def test_stop_strings_wait_for_min_tokens(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, stop=["a"], min_tokens=2)
    assert not push(text, b"aa")
    assert push(text, b"a")
    assert take(text).text == "aa"


def test_an_unfinished_character_comes_with_the_end(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary)
    push(text, "é😀".encode()[:-1])
    assert take(text).text == "é"
    text.finish("length")
    assert take(text).text == "\ufffd"


def test_offsets_count_characters_echo_included(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, echo="hey")
    push(text, "aéb".encode())
    delta = take(text)
    assert delta.text == "heyaéb"
    assert [score.text_offset for score in delta.scores] == [3, 4, 4, 5]


def test_scores_that_nobody_asked_for_are_counted_and_not_shown(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, logprobs=None)
    assert text.mean_logprob == 0.0
    text.push(97, Score(-1.0))
    text.push(98, Score(-2.0))
    assert take(text).scores == []
    assert text.mean_logprob == -1.5


def test_a_hypothesis_s_score_comes_with_its_end(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary)
    push(text, b"a")
    assert take(text).score is None
    text.finish("length", -0.25)
    assert take(text).score == -0.25


def test_echo_without_tokens(byte_vocabulary: Vocabulary) -> None:
    text = sample(byte_vocabulary, echo="hey")
    text.finish("length")
    delta = take(text)
    assert (delta.text, delta.finish_reason) == ("hey", "length")


def test_echoed_prompt_offsets_fit_its_text(byte_vocabulary: Vocabulary) -> None:
    text, offsets = echo_prompt(byte_vocabulary, [END, *"aéb".encode()], skipped=1)
    assert text == "aéb"
    assert offsets == [0, 0, 1, 1, 2]
