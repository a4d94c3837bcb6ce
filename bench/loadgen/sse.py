"""Reads a streamed HTTP response: bytes as they come from the socket in, events out."""

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_EVENT_BYTES = 4 * 1024 * 1024


class MalformedResponseError(Exception):
    """Bytes that are not HTTP, or more of them than a sane server sends."""


class EventSplitter:
    """Server-sent events (the `data` fields of a ``text/event-stream``) from bytes in any pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises MalformedResponseError."""
        if not self._rest and not self._data and _is_one_event(piece):
            return [piece[6:-2].removesuffix(b"\r")]
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._line(line.removesuffix(b"\r"), events)
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise MalformedResponseError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        # Other fields (event, id, retry) and comments carry no output.


def _is_one_event(piece: bytes) -> bool:
    """Whether this is a whole event of one line, as most pieces are."""
    return piece[:6] == b"data: " and piece[-2:] == b"\n\n" and piece.find(b"\n") == len(piece) - 2


class HttpResponse:
    """One HTTP/1.1 response, read piece by piece."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_complete = False
        self._head_bytes = 0
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, piece: bytes) -> bytes:
        """The part of the body that this piece carries. Raises MalformedResponseError."""
        if self.status is None:
            self._head_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserError as error:
            raise MalformedResponseError(str(error)) from error
        if self.status is None and self._head_bytes > MAX_HEAD_BYTES:
            raise MalformedResponseError(f"a head of more than {MAX_HEAD_BYTES} bytes")
        body, self._body = self._body, b""
        return body

    # -- called by httptools ------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.is_complete = True
