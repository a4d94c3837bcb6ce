"""The server-sent events of an OpenAI stream."""

import json
import secrets
from collections.abc import Iterable

from octavo.frontend.openai_format import ChatFormatter, CompletionFormatter, Json
from octavo.frontend.openai_types import ChatRequest, CompletionRequest
from octavo.frontend.sample import Delta

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _json(body).encode() + b"\n\n"


class EventWriter:
    """Writes the deltas of one API call's streams.

    Almost every event is the one before it with another text. So the halves around the text are kept
    for each choice, once its first event is out.
    """

    def __init__(
        self, formatter: ChatFormatter | CompletionFormatter, asked: ChatRequest | CompletionRequest
    ) -> None:
        self._formatter, self._asked = formatter, asked
        self._keeps_halves = _is_text_alone(asked)
        self._halves: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def events(self, news: Iterable[tuple[int, Delta]]) -> bytes:
        """The events that these make, each with the index of its stream; often none."""
        return b"".join([self._events(stream, delta) for stream, delta in news])

    def end(self) -> bytes:
        """What is behind the last delta."""
        usage = event(self._formatter.last_chunk()) if self._asked.wants_usage else b""
        return usage + _DONE

    def _events(self, stream: int, delta: Delta) -> bytes:
        halves = None if delta.finish_reason else self._halves.get((stream, delta.index))
        if halves is not None:
            return halves[0] + _json(delta.text).encode() + halves[1] if delta.text else b""
        written = self._whole_events(stream, delta)
        if self._keeps_halves and written:
            self._halves[stream, delta.index] = self._make_halves(stream, delta.index)
        return written

    def _make_halves(self, stream: int, index: int) -> tuple[bytes, bytes]:
        mark = secrets.token_hex(16)
        written = self._whole_events(stream, Delta(index, mark, [], []))
        before, after = written.split(_json(mark).encode())
        return before, after

    def _whole_events(self, stream: int, delta: Delta) -> bytes:
        chunks = self._formatter.chunks(stream, delta)
        for chunk in chunks:
            if self._asked.wants_running_usage:
                chunk["usage"] = self._formatter.usage()
            elif self._asked.wants_usage:
                chunk["usage"] = None
        return b"".join(map(event, chunks))


def _is_text_alone(asked: ChatRequest | CompletionRequest) -> bool:
    """Whether the events of a choice differ in nothing but their text, until its last."""
    has_scores = asked.logprobs is not None and asked.logprobs is not False  # 0 asks for scores
    return not (has_scores or asked.return_token_ids or asked.wants_running_usage)
