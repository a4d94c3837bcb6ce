"""OpenAI-compatible HTTP, streamed: plain sockets, because the client shares the server's cores."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from loadgen.completion import CompletionStream
from loadgen.exchange import Exchange, Take
from loadgen.lengths import InputError
from loadgen.records import Record, RequestError
from loadgen.workload import Request

APIS = ("completions", "chat")
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

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
        stream = CompletionStream(record)
        await self._exchange("POST", self._path, body, stream.feed)
        stream.check_end()

    async def close(self) -> None:
        """Nothing is kept open between requests."""

    async def _first_model(self) -> str:
        answer = bytearray()
        await self._exchange(
            "GET", self._prefix + "/v1/models", b"", lambda piece, _: answer.extend(piece)
        )
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

    async def _exchange(self, method: str, path: str, body: bytes, take: Take) -> None:
        """Raises RequestError and OSError."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        transport, exchange = await loop.create_connection(
            lambda: Exchange(take), self._host, self._port, ssl=self._ssl or None
        )
        try:
            transport.write(head.encode() + body)
            await exchange.end()
        finally:
            transport.close()
