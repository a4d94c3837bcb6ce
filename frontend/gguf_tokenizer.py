"""The encoder that a GGUF file describes: byte-level BPE, or SentencePiece's BPE.

The key-values: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section Tokenizer.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.common.modelfiles import ModelError, ModelFiles

# The split patterns of these families, as their own tokenizer files have them.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types
_SPACE = "\u2581"  # how SentencePiece writes a space


def gguf_encoder(model: ModelFiles) -> tuple[tokenizers.Tokenizer, int | None]:
    """The encoder, and the id to put before every text, if there is one.

    Raises:
        ModelError: the file has none, or one of a kind that is not supported.
    """
    kind, pre = (model.gguf.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "llama":
        return _sentencepiece(model), _bos(model, by_default=True)
    if kind == "gpt2" and pre in _FAMILIES:
        family = _FAMILIES[pre]
        return _byte_level_bpe(model.gguf, family), _bos(model, family.adds_bos)
    raise ModelError(
        f"{model.path}: a tokenizer of kind {kind!r} with pre-tokenizer {pre!r} is not supported; "
        f"supported are kind 'llama' and kind 'gpt2' with {', '.join(sorted(_FAMILIES))}"
    )


def _bos(model: ModelFiles, by_default: bool) -> int | None:
    """Raises ModelError for an id that no token has."""
    if not model.gguf.get("tokenizer.ggml.add_bos_token", by_default):
        return None
    return _token_id(model, "tokenizer.ggml.bos_token_id")


def _token_id(model: ModelFiles, key: str) -> int | None:
    value, count = model.gguf.get(key), len(model.gguf["tokenizer.ggml.tokens"])
    if value is not None and not (isinstance(value, int) and 0 <= value < count):
        raise ModelError(f"{model.path}: `{key}` is {value!r}, and there are {count} tokens")
    return value


def _add_tokens(backend: tokenizers.Tokenizer, typed: Iterable[tuple[str, int]]) -> None:
    """Tells the library which tokens are matched in the text before anything else.

    One call for all of them: with each call the library makes its automaton anew.
    """
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in typed
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


# -- byte-level BPE -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """How one kind of byte-level BPE treats text before the merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False  # a whole word of the vocabulary is taken as it is
    adds_bos: bool = False  # where the file does not say


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


_FAMILIES = {
    "smollm": _Family(_digits_then_bytes),
    "gpt-2": _Family(_byte_level),
    "llama-bpe": _Family(
        functools.partial(_split_then_bytes, _LLAMA3_SPLIT), ignore_merges=True, adds_bos=True
    ),
    "qwen2": _Family(functools.partial(_split_then_bytes, _QWEN2_SPLIT), normalizer=normalizers.NFC),
}


def _byte_level_bpe(values: dict[str, Any], family: _Family) -> tokenizers.Tokenizer:
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=family.ignore_merges)
    )
    if family.normalizer:
        backend.normalizer = family.normalizer()
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, zip(tokens, values.get("tokenizer.ggml.token_type", ()), strict=False))
    return backend


# -- SentencePiece --------------------------------------------------------------------------------


def _sentencepiece(model: ModelFiles) -> tokenizers.Tokenizer:
    """BPE on characters, with bytes for those that have no token of their own.

    Raises:
        ModelError: there is not one score and one type for each token.
    """
    types, scores = _of_each_token(model, "token_type"), _of_each_token(model, "scores")
    tokens = [
        _respelled(token, kind)
        for token, kind in zip(model.gguf["tokenizer.ggml.tokens"], types, strict=True)
    ]
    unknown = _token_id(model, "tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(tokens, types, scores),
            unk_token=tokens[unknown or 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = model.gguf.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    typed = zip(tokens, types, strict=True)
    _add_tokens(backend, ((token, kind) for token, kind in typed if token.strip(_SPACE)))
    return backend


def _of_each_token(model: ModelFiles, name: str) -> Sequence[Any]:
    key, count = f"tokenizer.ggml.{name}", len(model.gguf["tokenizer.ggml.tokens"])
    values: Sequence[Any] = model.gguf.get(key, ())
    if len(values) != count:
        raise ModelError(f"{model.path}: `{key}` has {len(values)} entries for {count} tokens")
    return values


def _respelled(token: str, kind: int) -> str:
    """Converters write a user-defined run of spaces with plain spaces, which no text has any more when
    it comes to the merges. It is the merges that find them, as in Hugging Face's tokenizers."""
    return _SPACE * len(token) if kind == _USER_DEFINED and not token.strip(" ") else token


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All ways to put two tokens together to a third, the best first.

    SentencePiece merges, time and again, the two neighbours whose whole has the highest score
    (Kudo and Richardson, "SentencePiece", 2018; `bpe_model.cc` there). User-defined tokens come before
    all others, whatever their scores.
    """
    parts = {t for t, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    wholes = [i for i, token in enumerate(tokens) if len(token) > 1 and token in parts]
    wholes.sort(key=lambda i: (types[i] != _USER_DEFINED, -scores[i]))
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in wholes)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in parts and token[cut:] in parts
    ]
