"""Text to token ids and back, for GGUF files and for Hugging Face folders.

The `tokenizers` library does the encoding. Decoding goes through the bytes of each token, so that a
stream can be decoded token by token without ever decoding it again (see `detokenizer`).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.frontend.gguf_tokenizer import gguf_encoder

_LONGEST_TOKEN = 4096  # characters; no vocabulary has a longer one
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token, and which tokens are special.

    `pieces[id]` is what token `id` adds to the text. `strips_first_space` is whether the decoder
    drops one space at the very beginning of a text, as SentencePiece's does.
    """

    pieces: Sequence[bytes]
    special: frozenset[int]
    strips_first_space: bool


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, model_vocab_size: int, added_bos: int | None = None
    ) -> None:
        """
        Args:
            backend: the encoder.
            model_vocab_size: models may have more ids than tokenizers; the others have no text.
            added_bos: id to put before every encoded text, where `backend` does not do it itself.
        """
        self._backend = backend
        self._bos = added_bos
        self.vocabulary = _vocabulary(backend, model_vocab_size)
        self.vocab_size = len(self.vocabulary.pieces)
        longest = max(map(len, self.vocabulary.pieces), default=1)
        self.max_token_chars = min(max(longest, 1), _LONGEST_TOKEN)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens that are written out in it count as such."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos is not None:
            return [self._bos, *ids]
        return list(ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of a whole list; bytes that are not UTF-8 become U+FFFD."""
        pieces, special = self.vocabulary.pieces, self.vocabulary.special
        skip = special if skip_special_tokens else frozenset[int]()
        text = b"".join(pieces[i] for i in token_ids if i not in skip).decode("utf-8", "replace")
        return text[1:] if self.vocabulary.strips_first_space and text.startswith(" ") else text

    def added_prefix(self, token_ids: Sequence[int], text: str) -> int:
        """How many tokens at the start of `encode(text)` are not part of `text` (BOS)."""
        if not token_ids or token_ids[0] not in self.vocabulary.special:
            return 0
        return 0 if text.encode("utf-8").startswith(self.vocabulary.pieces[token_ids[0]]) else 1

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are not UTF-8 become U+FFFD."""
        return self.vocabulary.pieces[token_id].decode("utf-8", "replace")


def open_tokenizer(model: ModelFiles) -> Tokenizer:
    """The tokenizer of a model.

    Raises:
        ModelError: the files have none, or one of a kind that is not supported.
    """
    if model.format == "gguf":
        backend, bos = gguf_encoder(model)
        return Tokenizer(backend, model.config["vocab_size"], bos)
    path = model.path / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{model.path} has no tokenizer.json, which the gateway needs")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
    _check_size(path, backend, model.config["vocab_size"])
    return Tokenizer(backend, model.config["vocab_size"])


def _check_size(path: Path, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Raises ModelError where the vocabulary goes beyond the model's. Tokens that were added to it may:
    models of text are published with the tokens that others have for images."""
    largest = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= vocab_size:
        raise ModelError(
            f"{path} has tokens up to id {largest}, and the model's `vocab_size` is {vocab_size}: "
            "it is the tokenizer of another model"
        )


# -- the bytes of tokens ----------------------------------------------------------------------------


def _vocabulary(backend: tokenizers.Tokenizer, minimum: int) -> Vocabulary:
    to_bytes, strips = _token_reader(backend)
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * max(minimum, max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        pieces[i] = to_bytes(token)
    special = frozenset(i for i, token in added.items() if token.special)
    return Vocabulary(pieces, special, strips)


def _token_reader(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How this tokenizer's decoder reads a token, and whether it drops the first space."""
    decoder: dict[str, Any] = json.loads(backend.to_str()).get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_reader(), False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _sentencepiece_bytes, kinds[-1] == "Strip"
    raise ModelError(
        f"a tokenizer whose decoder is {'+'.join(kinds)} is not supported; supported are byte-level "
        "BPE and SentencePiece with byte fallback"
    )


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode("utf-8")


def _byte_level_reader() -> Callable[[str], bytes]:
    byte_of = _byte_level_alphabet()

    def read(token: str) -> bytes:
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:  # an added token, which stands for itself
            return token.encode("utf-8")

    return read


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or one above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
