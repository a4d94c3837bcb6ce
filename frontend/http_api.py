"""OpenAI's HTTP API, and the gateway's own probes, as a FastAPI application."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client
import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from octavo.common.logs import OneLineASecond
from octavo.frontend.access import Certificate
from octavo.frontend.bounded_http import BoundedProtocol
from octavo.frontend.doorkeeper import LoggedTls
from octavo.frontend.errors import RequestError
from octavo.frontend.generation import Generator
from octavo.frontend.http_response import Reply, ShortSend, WatchedResponse, error_headers
from octavo.frontend.openai_events import EventWriter
from octavo.frontend.openai_format import ChatFormatter, CompletionFormatter, error_body
from octavo.frontend.openai_types import ChatRequest, CompletionRequest
from octavo.frontend.sample import Delta
from octavo.frontend.streams import Batch

MAX_BODY_BYTES = 16 << 20
BODY_SECONDS = 60.0  # that a client has to send one
_LAST_SECONDS = 2  # that answers get to leave when the server stops


class HttpApi:
    """The routes. `ready` says whether the service can serve now."""

    def __init__(self, generator: Generator, ready: Callable[[], bool]) -> None:
        self._generator = generator
        self._ready = ready
        self._created = int(time.time())
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/ready", self._readiness, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"])
        app.add_api_route("/v1/completions", self._completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_exception_handler(RequestError, _on_request_error)
        app.add_exception_handler(HTTPException, _on_http_exception)
        self.app: ASGIApp = ShortSend(app)

    # -- probes ---------------------------------------------------------------------------------

    async def _health(self) -> Response:
        return PlainTextResponse("alive\n")

    async def _readiness(self) -> Response:
        if self._ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", status_code=503)

    async def _metrics(self) -> Response:
        data = prometheus_client.generate_latest(self._generator.metrics.registry)
        return Response(data, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    # -- models -----------------------------------------------------------------------------------

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._generator.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": self._generator.limits().max_model_len,
        }

    def _check_model(self, name: str) -> None:
        served = self._generator.model.name
        if name != served:
            raise RequestError(
                "NOT_FOUND", f"the model {name!r:.200} does not exist; {served!r} does", "model"
            )

    # -- generation -----------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        asked = CompletionRequest.read(await _read_body(request))
        return self._answer(
            asked, lambda batch: CompletionFormatter(asked, self._generator.tokenizer, batch.streams)
        )

    async def _chat(self, request: Request) -> Response:
        asked = ChatRequest.read(await _read_body(request))
        return self._answer(
            asked, lambda batch: ChatFormatter(asked, self._generator.tokenizer, batch.streams)
        )

    def _answer(
        self,
        asked: CompletionRequest | ChatRequest,
        formatter: Callable[[Batch], CompletionFormatter | ChatFormatter],
    ) -> Response:
        self._check_model(asked.model)
        calls = asked.calls()

        async def work(reply: Reply) -> None:
            with await self._generator.open(calls) as batch:
                if asked.stream:
                    await _stream(reply, batch, formatter(batch), asked)
                else:
                    await _whole(reply, batch, formatter(batch))

        return WatchedResponse(work)


async def _whole(reply: Reply, batch: Batch, formatter: CompletionFormatter | ChatFormatter) -> None:
    deltas: list[tuple[int, Delta]] = []
    while news := await batch.take():
        deltas += news
    await reply.body(200, formatter.answer(deltas))


async def _stream(
    reply: Reply,
    batch: Batch,
    formatter: CompletionFormatter | ChatFormatter,
    asked: CompletionRequest | ChatRequest,
) -> None:
    writer = EventWriter(formatter, asked)
    while news := await batch.take():
        if events := writer.events(news):
            await reply.events(events)
    await reply.events(writer.end(), more=False)


async def _read_body(request: Request) -> bytes:
    """The request's body. Raises RequestError when it is too large or too slow."""
    body = bytearray()
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except ClientDisconnect as error:
        raise RequestError("CANCELLED", "the client left before its request was whole") from error
    except TimeoutError as error:
        text = f"the body was not whole within {BODY_SECONDS:g} s"
        raise RequestError("DEADLINE_EXCEEDED", text, http_status=408) from error
    return bytes(body)


def _too_large() -> RequestError:
    text = f"the body has more than the limit of {MAX_BODY_BYTES} bytes"
    return RequestError("INVALID_ARGUMENT", text, http_status=413)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = error_headers(error)
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    body = error_body(RequestError("INVALID_ARGUMENT", f"{error.detail}: {request.url.path:.200}"))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket; signals are the gateway's business."""

    def __init__(self, app: ASGIApp, max_connections: int, certificate: Certificate | None) -> None:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").addFilter(OneLineASecond())  # such as of invalid requests
        config = uvicorn.Config(
            app,
            ssl_certfile=certificate.cert if certificate else None,
            ssl_keyfile=certificate.key if certificate else None,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=BoundedProtocol,
            ws="none",
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        config.load()
        if config.ssl is not None:
            config.ssl.sslobject_class = LoggedTls
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
    except OSError:
        bound.close()
        raise
    return bound
