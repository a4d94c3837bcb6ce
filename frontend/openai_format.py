"""Answers in the shapes of the OpenAI API."""

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.frontend.errors import RequestError
from octavo.frontend.openai_types import ChatRequest, CompletionRequest
from octavo.frontend.sample import Delta, TokenScore
from octavo.frontend.streams import Stream
from octavo.frontend.tokenizer import Tokenizer

_ERROR_TYPES = {
    "RESOURCE_EXHAUSTED": "rate_limit_error",
    "UNAVAILABLE": "service_unavailable_error",
    "UNAUTHENTICATED": "authentication_error",
    "INTERNAL": "server_error",
    "DEADLINE_EXCEEDED": "timeout_error",
}
_ERROR_CODES = {
    "NOT_FOUND": "model_not_found",
    "UNAUTHENTICATED": "invalid_api_key",
    "UNIMPLEMENTED": "not_offered",
}

Json = dict[str, Any]


def error_body(error: RequestError) -> Json:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.code, "invalid_request_error"),
            "param": error.field,
            "code": _ERROR_CODES.get(error.code),
        }
    }


class _Formatter:
    """What answers of both kinds share. One for each API call."""

    prefix: str
    whole: str  # the `object` of an answer
    chunk: str  # the `object` of a stream's event

    def __init__(
        self, model: str, n: int, with_ids: bool, tokenizer: Tokenizer, streams: Sequence[Stream]
    ) -> None:
        self._head: Json = {
            "id": f"{self.prefix}-{secrets.token_hex(16)}",
            "object": self.whole,
            "created": int(time.time()),
            "model": model,
        }
        self._n = n
        self._with_ids = with_ids
        self._tokenizer = tokenizer
        self._streams = streams
        self._begun: set[int] = set()

    def answer(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        """The whole answer from all deltas, each with the index of its stream."""
        samples: dict[tuple[int, int], Delta] = {}
        for stream, delta in deltas:
            whole = samples.setdefault((stream, delta.index), Delta(delta.index, "", [], []))
            whole.text += delta.text
            whole.token_ids += delta.token_ids
            whole.scores += delta.scores
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            whole.score = delta.score
        choices = [self._choice(stream, whole) for (stream, _), whole in sorted(samples.items())]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        parts = [stream.usage() for stream in self._streams]
        prompt = sum(part.prompt_tokens for part in parts)
        completion = sum(part.completion_tokens for part in parts)
        cached = sum(part.cached_tokens for part in parts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def last_chunk(self) -> Json:
        """The event that reports the usage of the whole stream."""
        return {**self._head, "object": self.chunk, "choices": [], "usage": self.usage()}

    def _begins(self, index: int) -> bool:
        """Whether this is the first that is written of a choice."""
        is_first = index not in self._begun
        self._begun.add(index)
        return is_first

    def _ending(self, stream: int, delta: Delta, is_first: bool) -> Json:
        """The fields that end every choice."""
        is_eos = isinstance(delta.stop_reason, int) and not self._streams[stream].is_stop_token(
            delta.stop_reason
        )
        fields: Json = {
            "finish_reason": delta.finish_reason or None,
            "stop_reason": None if is_eos else delta.stop_reason,
        }
        if delta.score is not None:  # JSON has no infinity
            fields["score"] = delta.score if math.isfinite(delta.score) else None
        if self._with_ids:
            fields["token_ids"] = delta.token_ids
            if is_first:
                fields["prompt_token_ids"] = list(self._streams[stream].prompt_ids)
        return fields

    def _choice(self, stream: int, delta: Delta) -> Json:
        raise NotImplementedError


class CompletionFormatter(_Formatter):
    """Answers of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, streams: Sequence[Stream]
    ) -> None:
        super().__init__(
            request.model, request.n or 1, bool(request.return_token_ids), tokenizer, streams
        )
        self._logprobs = request.logprobs
        self._echo = bool(request.echo)

    def chunks(self, stream: int, delta: Delta) -> list[Json]:
        """The events that a delta makes."""
        if not (delta.text or delta.finish_reason or delta.scores or self._with_ids):
            return []
        return [{**self._head, "choices": [self._choice(stream, delta)]}]

    def _choice(self, stream: int, delta: Delta) -> Json:
        index = stream * self._n + delta.index
        is_first = self._begins(index)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._scores(stream, delta, is_first),
            **self._ending(stream, delta, is_first),
        }

    def _scores(self, stream: int, delta: Delta, is_first: bool) -> Json | None:
        if self._logprobs is None:
            return None
        scores = delta.scores
        if is_first and self._echo:
            scores = [*self._streams[stream].prompt_scores, *scores]
        return {
            "tokens": [self._name(score.token) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [self._top(score) for score in scores],
            "text_offset": [score.text_offset for score in scores],
        }

    def _top(self, score: TokenScore) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        top = {self._name(token): logprob for token, logprob in score.top}
        return {**top, self._name(score.token): score.logprob}

    def _name(self, token: int) -> str:
        """The token's text; pieces of characters are written as their bytes."""
        piece = self._tokenizer.vocabulary.pieces[token]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatFormatter(_Formatter):
    """Answers of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, streams: Sequence[Stream]) -> None:
        super().__init__(
            request.model, request.n or 1, bool(request.return_token_ids), tokenizer, streams
        )
        self._logprobs = bool(request.logprobs)

    def chunks(self, stream: int, delta: Delta) -> list[Json]:
        """The events that a delta makes; each choice begins with one that names the role."""
        head = {**self._head, "object": self.chunk}
        is_first = self._begins(delta.index)
        events = []
        if is_first:
            role = {"role": "assistant", "content": ""}
            choice = {"index": delta.index, "delta": role, "logprobs": None, "finish_reason": None}
            events.append({**head, "choices": [choice]})
        if delta.text or delta.finish_reason or delta.scores or self._with_ids:
            choice = {
                "index": delta.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._scores(delta),
                **self._ending(stream, delta, is_first),
            }
            events.append({**head, "choices": [choice]})
        return events

    def _choice(self, stream: int, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._scores(delta),
            **self._ending(stream, delta, is_first=True),
        }

    def _scores(self, delta: Delta) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": [self._score(score) for score in delta.scores], "refusal": None}

    def _score(self, score: TokenScore) -> Json:
        top = [self._entry(token, logprob) for token, logprob in score.top]
        return {**self._entry(score.token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> Json:
        piece = self._tokenizer.vocabulary.pieces[token]
        return {"token": self._tokenizer.token_text(token), "logprob": logprob, "bytes": list(piece)}
