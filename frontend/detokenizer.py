"""Text from tokens as they come: what is given out never has to be taken back."""

import codecs
from collections.abc import Sequence

from octavo.frontend.tokenizer import Vocabulary

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one sample's tokens one at a time.

    The texts of all `push` calls and of `flush`, concatenated, are the decode of all the tokens. A
    character whose bytes are spread over tokens appears with its last byte. Bytes that can be no
    character become U+FFFD as soon as that is certain, so at most three bytes ever wait.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, prompt: Sequence[int] = ()
    ) -> None:
        """`prompt` are the tokens before: they settle whether a first space is the text's first."""
        self._pieces = vocabulary.pieces
        self._skip = vocabulary.special if skip_special_tokens else frozenset[int]()
        self._decoder = _decoder("replace")
        self._waits = False  # whether the decoder holds bytes of a character that is not whole
        self._strip = vocabulary.strips_first_space and all(i in vocabulary.special for i in prompt)

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often empty."""
        if token_id in self._skip:
            return ""
        piece = self._pieces[token_id]
        if piece.isascii() and not self._waits:  # most are; the decoder is Python, and slower
            text = piece.decode("ascii")
            return self._stripped(text) if self._strip else text
        text = self._decoder.decode(piece)
        self._waits = self._decoder.getstate()[0] != b""
        return self._stripped(text)

    def flush(self) -> str:
        """What still waits, at the end of the sample."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if not self._strip or not text:
            return text
        self._strip = False
        return text[1:] if text[0] == " " else text
