"""One HTTP request and its response, on a connection of their own."""

import asyncio
import time
from collections.abc import Callable

from loadgen.completion import error_text
from loadgen.records import RequestError
from loadgen.sse import HttpResponse, MalformedResponseError

_MAX_REFUSAL_BYTES = 1024 * 1024  # read of a body that only says why there is no other

Take = Callable[[bytes, float], None]


class Exchange(asyncio.Protocol):
    """Reads the response as its bytes arrive, and wakes the task that waits only at the end.

    Args:
        take: called with each part of the body of a response 200 and the time (perf_counter) at which
            it came; an error that it raises ends the exchange.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._response = HttpResponse()
        self._refusal = b""  # the body of any other response
        self._outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def end(self) -> None:
        """Waits for the end of the response or of the connection. Raises RequestError and OSError."""
        if (error := await self._outcome) is not None:
            raise error

    # -- called by the event loop -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._outcome.done():  # given up
            return
        try:
            body = self._response.feed(data)
            if self._response.status == 200:
                self._take(body, now)
            else:
                self._refusal += body
        except RequestError as error:
            self._end(error)
        except MalformedResponseError as error:
            self._end(RequestError("bad response", str(error)))
        if self._response.is_complete or len(self._refusal) >= _MAX_REFUSAL_BYTES:
            self._end(self._failure())

    def eof_received(self) -> None:
        self._end(self._failure())

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or self._failure())

    # -----------------------------------------------------------------------------------------------

    def _failure(self) -> RequestError | None:
        """What the status says."""
        if self._response.status in (None, 200):
            return None
        return RequestError(f"http {self._response.status}", error_text(self._refusal))

    def _end(self, error: Exception | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(error)
