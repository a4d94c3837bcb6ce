"""An HTTP answer that stops being computed when its client is gone."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.frontend.errors import RETRY_SECONDS, RequestError
from octavo.frontend.openai_format import error_body

log = logging.getLogger(__name__)


# Errors that may come before the whole request has: what is left of it is not waited for.
_CLOSING = (401, 408, 413)
_SHORT_SEND = "octavo.send"  # in the scope


def error_headers(error: RequestError) -> dict[str, str]:
    """When to try again, where that makes sense; whether the connection ends."""
    headers = {"retry-after": str(RETRY_SECONDS)} if error.may_be_retried else {}
    return headers | ({"connection": "close"} if error.http_status in _CLOSING else {})


class ShortSend:
    """Shows the responses of `app` the server's own `send`.

    Each layer of the framework wraps `send` in a coroutine that looks for an answer's start. Events
    behind it, thousands to one start, need not pass through them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _SHORT_SEND: send}, receive, send)


class Reply:
    """What an answer is written with: either one JSON body or a stream of events."""

    def __init__(self, send: Send, short_send: Send) -> None:
        """`short_send` is for what comes behind the answer's start; see `ShortSend`."""
        self._send, self._short_send = send, short_send
        self._started = False

    async def body(self, status: int, body: dict[str, Any], **more: str) -> None:
        """The whole answer; `more` are headers."""
        data = json.dumps(body, ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})

    async def events(self, data: bytes, more: bool = True) -> None:
        """Server-sent events; returns when the client takes them, so a slow one waits alone."""
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._short_send({"type": "http.response.body", "body": data, "more_body": more})

    async def error(self, error: RequestError) -> None:
        """The error as a status, or as an event where the stream has begun."""
        if not self._started:
            await self.body(error.http_status, error_body(error), **error_headers(error))
        else:
            event = b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
            await self.events(event, more=False)


class WatchedResponse(Response):
    """Runs `work` and cancels it as soon as the client disconnects."""

    def __init__(self, work: Callable[[Reply], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, scope.get(_SHORT_SEND, send))
        work = asyncio.ensure_future(self._run(reply))
        watch = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("an answer could not be sent: %s", error)

    async def _run(self, reply: Reply) -> None:
        try:
            await self._work(reply)
        except RequestError as error:
            await reply.error(error)
        except Exception:
            log.exception("a request failed")
            await reply.error(RequestError("INTERNAL", "the gateway failed this request"))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
