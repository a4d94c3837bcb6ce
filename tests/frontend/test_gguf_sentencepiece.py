"""SentencePiece tokenizers from a GGUF file's key-values, beside the algorithm as it is told."""

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.tokenizer import Tokenizer, open_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"


@dataclass
class Vocabulary:
    """Tokens with their types and scores, in the order of their ids."""

    tokens: list[str]
    types: list[int]
    scores: list[float]

    def add(self, token: str, kind: int, score: float) -> None:
        self.tokens.append(token)
        self.types.append(kind)
        self.scores.append(score)

    def model(self, **changes: Any) -> ModelFiles:
        """A model with this vocabulary; `changes` are of the keys below `tokenizer.ggml`."""
        values = {
            "model": "llama",
            "tokens": self.tokens,
            "token_type": self.types,
            "scores": self.scores,
            "bos_token_id": 1,
            "unknown_token_id": 0,
            **changes,
        }
        named = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
        config = {"vocab_size": len(self.tokens)}
        return ModelFiles("m", Path("m.gguf"), "gguf", config, (), "digest", gguf=named)

    def open(self, **changes: Any) -> Tokenizer:
        return open_tokenizer(self.model(**changes))


@pytest.fixture
def vocabulary() -> Vocabulary:
    """The letters a to d and 60 tokens made of them, their scores in no order."""
    made = Vocabulary(["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL], [0.0] * 3)
    for byte in range(256):
        made.add(f"<0x{byte:02X}>", BYTE, 0.0)
    rng, known = random.Random(5), [*"abcd", SPACE]
    while len(known) < 65:
        token = rng.choice(known) + rng.choice(known)
        # Of overlapping ways to make a token that repeats itself, ours does not take the first.
        if token not in known and token not in (token + token)[1:-1] and len(token) < 9:
            known.append(token)
    scores = rng.sample(range(-1000, 0), len(known))
    for token, score in zip(known, scores, strict=True):
        made.add(token, NORMAL, float(score))
    return made


def told(vocabulary: Vocabulary, text: str) -> list[int]:
    """Merges the two neighbours with the best score, the first of such pairs, as long as there are any;
    then writes what is no token as bytes."""
    normal = {
        token: (i, vocabulary.scores[i])
        for i, token in enumerate(vocabulary.tokens)
        if vocabulary.types[i] == NORMAL
    }
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [(-normal[a + b][1], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in normal]
        if not pairs:
            break
        _, best = min(pairs)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [normal[part][0]] if part in normal else [3 + byte for byte in part.encode()]
    return ids


def test_ids_are_those_of_the_algorithm(vocabulary: Vocabulary) -> None:
    plain, prefixed = vocabulary.open(add_space_prefix=False), vocabulary.open()
    rng, lengths = random.Random(0), []
    for _ in range(300):
        text = "".join(rng.choices("abcd é🙂", [8, 8, 8, 8, 6, 1, 1], k=rng.randint(1, 60)))
        ids = told(vocabulary, text)
        lengths.append(len(text) - len(ids))
        assert plain.encode(text) == [1, *ids]
        assert prefixed.encode(text) == [1, *told(vocabulary, " " + text)]
    assert max(lengths) > 10  # tokens were merged


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("text", ["ab cd", "  a", "a é🙂\n\td ", "日本 a", ""])
def test_texts_come_back(vocabulary: Vocabulary, prefixed: bool, text: str) -> None:
    tokenizer = vocabulary.open(add_space_prefix=prefixed)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    stream = Detokenizer(tokenizer.vocabulary, skip_special_tokens=True)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


def test_bos_is_added_unless_the_file_says_no(vocabulary: Vocabulary) -> None:
    tokenizer = vocabulary.open()
    ids = tokenizer.encode("ab")
    assert ids[0] == 1
    assert tokenizer.added_prefix(ids, "ab") == 1
    assert tokenizer.encode("ab", add_special_tokens=False) == ids[1:]
    assert vocabulary.open(add_bos_token=False).encode("ab") == ids[1:]
    assert vocabulary.open(bos_token_id=None).encode("ab") == ids[1:]


def test_control_and_user_defined_tokens_are_found_whole(vocabulary: Vocabulary) -> None:
    vocabulary.add("<turn>", CONTROL, 0.0)
    vocabulary.add("\n\n", USER_DEFINED, -1000.0)
    turn, lines = len(vocabulary.tokens) - 2, len(vocabulary.tokens) - 1
    tokenizer = vocabulary.open(add_space_prefix=False, add_bos_token=False)
    text = "a<turn>b\n\nc\n"
    ids = tokenizer.encode(text)
    assert ids == [
        *told(vocabulary, "a"),
        turn,
        *told(vocabulary, "b"),
        lines,
        *told(vocabulary, "c\n"),
    ]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab\n\nc\n"


def test_runs_of_spaces_come_before_words(vocabulary: Vocabulary) -> None:
    """Files have them with plain spaces and the lowest scores."""
    for length in (2, 3, 4):
        vocabulary.add(" " * length, USER_DEFINED, -9999.0)
    two, three, four = range(len(vocabulary.tokens) - 3, len(vocabulary.tokens))
    tokenizer = vocabulary.open(add_space_prefix=False, add_bos_token=False)
    for text, run in (("a  b", two), ("a   b", three), ("a    b", four)):
        assert tokenizer.encode(text) == [*told(vocabulary, "a"), run, *told(vocabulary, "b")]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, r"m\.gguf: `tokenizer\.ggml\.scores` has 1 entries for \d+ tokens"),
        ({"token_type": None}, r"m\.gguf: `tokenizer\.ggml\.token_type` has 0 entries for \d+ tokens"),
        ({"bos_token_id": 5000}, r"m\.gguf: `tokenizer\.ggml\.bos_token_id` is 5000, and there are"),
        ({"unknown_token_id": -1}, r"m\.gguf: `tokenizer\.ggml\.unknown_token_id` is -1, and there"),
        ({"model": "t5"}, r"m\.gguf: a tokenizer of kind 't5' .* supported are kind 'llama' and kind"),
    ],
)
def test_what_does_not_fit_is_refused(
    vocabulary: Vocabulary, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        vocabulary.open(**changes)
