"""Incremental decoding: what is given out never has to be taken back."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import folder, sentencepiece

from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.tokenizer import Tokenizer, Vocabulary, open_tokenizer

VOCABULARY = Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], frozenset([256]), False)

HARD_TEXTS = [
    "😀",
    "👩‍👩‍👧‍👦 family",
    "🇫🇷🇩🇪",
    "✊🏿",
    "東京は日本の首都です",
    "한국어 텍스트",
    "नमस्ते दुनिया",
    "aé😀b",
]


def deltas(vocabulary: Vocabulary, ids: Sequence[int], skip: bool = False) -> list[str]:
    decoder = Detokenizer(vocabulary, skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_one_byte_per_token(text: str) -> None:
    parts = deltas(VOCABULARY, list(text.encode()))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_real_tokens(tokenizer: Tokenizer, text: str) -> None:
    parts = deltas(tokenizer.vocabulary, tokenizer.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@settings(derandomize=True, max_examples=300)
@given(st.binary(max_size=40))
def test_any_bytes_give_the_whole_decode(data: bytes) -> None:
    assert "".join(deltas(VOCABULARY, list(data))) == data.decode("utf-8", "replace")


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_any_real_tokens_give_the_library_s_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip in (False, True):
        whole = tokenizer._backend.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas(tokenizer.vocabulary, ids, skip)) == whole
        assert tokenizer.decode(ids, skip) == whole


@settings(derandomize=True, max_examples=200)
@given(st.text(max_size=20), st.integers(0, 3))
def test_a_character_appears_with_its_last_byte(text: str, cut: int) -> None:
    """A text that is cut inside a character gives every character before it at once."""
    data = text.encode()
    decoder = Detokenizer(VOCABULARY, False)
    seen = "".join(decoder.push(byte) for byte in data[: len(data) - cut])
    assert text.startswith(seen)
    assert len(seen) >= len(data[: len(data) - cut].decode("utf-8", "ignore"))


def test_invalid_bytes_hold_nothing_back() -> None:
    decoder = Detokenizer(VOCABULARY, False)
    assert decoder.push(0xFF) == "\ufffd"
    assert decoder.push(0xE2) == ""
    assert decoder.push(ord("a")) == "\ufffda"


def test_an_unfinished_character_is_flushed_once() -> None:
    decoder = Detokenizer(VOCABULARY, False)
    assert "".join(map(decoder.push, "é😀".encode()[:-1])) == "é"
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_special_tokens_are_skipped_inside_a_character() -> None:
    first, second = "é".encode()
    assert deltas(VOCABULARY, [first, 256, second], skip=True) == ["", "", "é", ""]
    assert "".join(deltas(VOCABULARY, [ord("a"), 256])) == "a<end>"


def test_sentencepiece_space_at_the_start_of_a_text_only(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(folder(tmp_path, sentencepiece(), 300))
    ids = tokenizer.encode("hi hi")
    continued = Detokenizer(tokenizer.vocabulary, True, prompt=[1, *ids])
    fresh = Detokenizer(tokenizer.vocabulary, True, prompt=[1])
    assert "".join(map(continued.push, ids)) == " hi hi"
    assert "".join(map(fresh.push, ids)) == "hi hi"
