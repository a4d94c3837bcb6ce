"""OpenAI-compatible HTTP, streamed: plain sockets, because the client shares the server's cores."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from loadgen.lengths import InputError
from loadgen.records import Record, RequestError
from loadgen.sse import EventSplitter, HttpResponse, MalformedResponseError
from loadgen.workload import Request

APIS = ("completions", "chat")
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_READ_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 1024 * 1024  # of a body that is not streamed

# Short words that most vocabularies hold as one token each: chat takes no token ids.
_WORDS = ("the", "a", "of", "to", "and", "in", "is", "it", "on", "as", "at", "by", "we", "he", "or")


class HttpClient:
    """A client of one OpenAI-compatible server; one connection for each request.

    Args:
        url: where the server is, with or without ``/v1``.
        api: one of APIS.
        model: None asks the server.
        extra: fields added to the body of every request.
    """

    def __init__(
        self, url: str, api: str, model: str | None, temperature: float, extra: dict[str, Any]
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"--url: {url!r} is not like http://127.0.0.1:8000")
        self._ssl = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._is_chat = api == "chat"
        self._path = self._prefix + _PATHS[api]
        self._model = model
        self._fields: dict[str, Any] = {
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    async def model(self) -> str:
        if self._model is None:
            self._model = await self._first_model()
        return self._model

    async def generate(self, request: Request, record: Record) -> None:
        body = json.dumps(self._body(await self.model(), request)).encode()
        stream, splitter = CompletionStream(record), EventSplitter()
        async with self._exchange("POST", self._path, body) as exchange:
            while (piece := await exchange.read()) is not None:
                if exchange.response.status not in (None, 200):
                    await exchange.fail(piece)
                for event in splitter.feed(piece):
                    stream.event(event, time.perf_counter())
        stream.check_end()

    async def close(self) -> None:
        """Nothing is kept open between requests."""

    async def _first_model(self) -> str:
        async with self._exchange("GET", self._prefix + "/v1/models", b"") as exchange:
            answer = await exchange.read_whole()
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise RequestError("bad response", f"/v1/models: {answer[:200]!r}") from error

    def _body(self, model: str, request: Request) -> dict[str, Any]:
        fields = {"model": model, "max_tokens": request.output_tokens, **self._fields}
        if not self._is_chat:
            return {**fields, "prompt": request.prompt}
        content = " ".join(_WORDS[token % len(_WORDS)] for token in request.prompt)
        return {**fields, "messages": [{"role": "user", "content": content}]}

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator["_Exchange"]:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl or None)
        try:
            writer.write(head.encode() + body)
            yield _Exchange(reader)
        except MalformedResponseError as error:
            raise RequestError("bad response", str(error)) from error
        finally:
            writer.close()


class _Exchange:
    """The response half of one connection."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.response = HttpResponse()
        self._reader = reader

    async def read(self) -> bytes | None:
        """The next part of the body; None at the end of the response or of the connection."""
        if self.response.is_complete:
            return None
        data = await self._reader.read(_READ_BYTES)
        return self.response.feed(data) if data else None

    async def read_whole(self, start: bytes = b"") -> bytes:
        body = start
        while len(body) < _MAX_WHOLE_BYTES and (piece := await self.read()) is not None:
            body += piece
        return body

    async def fail(self, start: bytes) -> None:
        """Raises RequestError with the server's words."""
        raise RequestError(f"http {self.response.status}", _error_text(await self.read_whole(start)))


class CompletionStream:
    """Reads the events of one completion into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._has_finished = False

    def event(self, data: bytes, now: float) -> None:
        """Raises RequestError for an error event or one that is not OpenAI's."""
        if data == b"[DONE]":
            self._has_finished = True
            return
        try:
            chunk = json.loads(data)
            self._usage(chunk.get("usage"))
            for choice in chunk.get("choices", ()):
                self._choice(choice, now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError("bad response", f"event {data[:200]!r}") from error
        if "error" in chunk:
            raise RequestError("error in stream", _error_text(data))

    def check_end(self) -> None:
        """Raises RequestError unless the stream came to its own end."""
        if not self._has_finished:
            raise RequestError("cut off", "the stream ended without a finish reason")

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            self._record.usage(usage["prompt_tokens"], usage["completion_tokens"], cached)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta", choice)
        text = delta.get("text") or delta.get("content") or delta.get("reasoning_content")
        ids = choice.get("token_ids")
        finish = choice.get("finish_reason")
        self._has_finished = self._has_finished or bool(finish)
        # A token can have no text yet, but an event that only says who speaks or why it ended has
        # no token.
        if text or ids or not (finish or delta.get("role")):
            self._record.delta(now, len(ids) if ids else 1)


def _error_text(body: bytes) -> str:
    """The message of OpenAI's error object, else the body as it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:500].decode(errors="replace").strip()
