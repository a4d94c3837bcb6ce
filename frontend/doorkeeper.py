"""What the gateway's servers do about callers without a key or without TLS."""

import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.common.logs import LimitedLog
from octavo.frontend.access import ApiKeys
from octavo.frontend.errors import RequestError
from octavo.frontend.http_response import error_headers
from octavo.frontend.metrics import Metrics
from octavo.frontend.openai_format import error_body

log = logging.getLogger("octavo.gateway")

# What anybody may ask, because orchestrators do: whether the gateway is alive and ready.
OPEN_PATHS = frozenset(("/health", "/ready"))
_OPEN_SERVICE = "/grpc.health.v1.Health/"


class Doorkeeper:
    """Owner of what is said and counted of calls without a valid key."""

    def __init__(self, keys: ApiKeys, metrics: Metrics) -> None:
        self.keys = keys
        self._metrics = metrics
        self._limited = LimitedLog(log)

    def refuse(self, api: str, peer: str) -> RequestError:
        """The answer to a call over `api`, "grpc" or "http"."""
        self._metrics.unauthenticated(api)
        self._limited.warning(
            api,
            "a call over %s from %s was refused: it has no valid API key; clients send it as "
            "`authorization: Bearer KEY` (octavo's commands: --api-key or OCTAVO_API_KEY)",
            *(api, peer),
        )
        return RequestError(
            "UNAUTHENTICATED",
            "authorization: no valid API key; send `Bearer KEY` with a key that this service knows",
        )


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends gRPC calls without a valid key. Health stays open, reflection does not."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper
        self._refusal: Any = grpc.unary_unary_rpc_method_handler(self._refuse)  # type: ignore[no-untyped-call]

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        metadata = dict(handler_call_details.invocation_metadata)
        given = metadata.get("authorization"), metadata.get("x-api-key")
        is_open = handler_call_details.method.startswith(_OPEN_SERVICE)
        if is_open or self._doorkeeper.keys.accept(*given):
            return await continuation(handler_call_details)
        return self._refusal

    async def _refuse(self, request: Any, context: Any) -> None:
        error = self._doorkeeper.refuse("grpc", context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)


class KeyMiddleware:
    """Answers HTTP requests without a valid key with 401. The paths of probes stay open."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app, self._doorkeeper = app, doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._accepts(scope):
            await self._app(scope, receive, send)
            return
        error = self._doorkeeper.refuse("http", (scope["client"] or ("?",))[0])
        headers = {"WWW-Authenticate": "Bearer", **error_headers(error)}
        answer = JSONResponse(error_body(error), status_code=error.http_status, headers=headers)
        await answer(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        return self._doorkeeper.keys.accept(headers.get(b"authorization"), headers.get(b"x-api-key"))


class LoggedTls(ssl.SSLObject):
    """A TLS connection whose failed handshake the operator hears of."""

    limited = LimitedLog(log)

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            hint = "it speaks HTTP without TLS: its URL must begin with https://"
            is_plain = error.reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER")
            self.limited.warning(
                "tls",
                "a client on the HTTP port was refused in the TLS handshake: %s",
                hint if is_plain else error.reason,
            )
            raise
