"""Reads the events of an OpenAI stream."""

import json
from typing import Any

from loadgen.records import Record, RequestError
from loadgen.repeats import Repeats, text_of
from loadgen.sse import EventSplitter


class CompletionStream:
    """Reads the body of one streamed completion into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._splitter = EventSplitter()
        self._repeats = Repeats()
        self._has_finished = False

    def feed(self, piece: bytes, now: float) -> None:
        """A part of the body and when it came.

        Raises RequestError for an error event or one that is not OpenAI's, MalformedResponseError.
        """
        for data in self._splitter.feed(piece):
            if self._repeats.has(data):
                self._record.delta(now, 1)
            elif data == b"[DONE]":
                self._has_finished = True
            else:
                self._parse(data, now)

    def check_end(self) -> None:
        """Raises RequestError unless the stream came to its own end."""
        if not self._has_finished:
            raise RequestError("cut off", "the stream ended without a finish reason")

    def _parse(self, data: bytes, now: float) -> None:
        try:
            chunk = json.loads(data)
            self._usage(chunk.get("usage"))
            for choice in chunk.get("choices", ()):
                self._choice(choice, now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError("bad response", f"event {data[:200]!r}") from error
        if "error" in chunk:
            raise RequestError("error in stream", error_text(data))
        if text := _only_text(chunk):
            self._repeats.learn(data, text)

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            self._record.usage(usage["prompt_tokens"], usage["completion_tokens"], cached)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        text = text_of(choice)
        ids = choice.get("token_ids")
        finish = choice.get("finish_reason")
        self._has_finished = self._has_finished or bool(finish)
        # A token can have no text yet, but an event that only says who speaks or why it ended has
        # no token.
        if text or ids or not (finish or choice.get("delta", choice).get("role")):
            self._record.delta(now, len(ids) if ids else 1)


def _only_text(chunk: dict[str, Any]) -> str | None:
    """The text of an event that does nothing else than bring one token's text."""
    choices = chunk.get("choices", ())
    if chunk.get("usage") or len(choices) != 1:
        return None
    (choice,) = choices
    text = text_of(choice)
    is_alone = isinstance(text, str) and not (choice.get("token_ids") or choice.get("finish_reason"))
    return text if is_alone else None


def error_text(body: bytes) -> str:
    """The message of OpenAI's error object, else the body as it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:500].decode(errors="replace").strip()
