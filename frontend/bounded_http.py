"""HTTP connections whose headers have limits, in bytes and in seconds, which uvicorn does not set."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10  # of the request line and all headers; one read more may be taken
HEADER_SECONDS = 20.0  # from a connection's, or a request's, first byte to the end of the headers


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A request that is too long or too slow before its body ends it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes: int | None = 0  # None: behind the headers
        self._timer = self.loop.call_later(HEADER_SECONDS, self._refuse, b"408 Request Timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
                return
            self._header_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_bytes is None:
            self._header_bytes = 0
            self._timer = self.loop.call_later(HEADER_SECONDS, self._refuse, b"408 Request Timeout")

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        self._timer.cancel()
        super().on_headers_complete()

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status
            )
            self.transport.close()
