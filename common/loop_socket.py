"""ZeroMQ sockets on the event loop, without a future or a task for each message."""

import asyncio
from collections.abc import Callable

import zmq

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_DRAIN_AT_ONCE = 1_000  # messages taken before other events get their turn

# As plain numbers: arithmetic on the library's enumerations takes as long as a small message.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class LoopSocket:
    """Hands each message of a socket to `on_message(parts)`, and calls `on_idle()` after each batch."""

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[list[bytes]], None],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._on_message, self._on_idle = on_message, on_idle
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)
        self._draining = self._stopped = False
        self._loop.call_soon(self.drain)

    def send(self, parts: list[bytes]) -> None:
        """Sends without waiting. Raises zmq.ZMQError."""
        try:
            self._socket.send_multipart(parts, _NOBLOCK)
        finally:
            self._look_again()

    def drain(self) -> None:
        """Handles what has arrived."""
        if self._draining or self._stopped:  # a handler that sends must not start a second drain
            return
        self._draining = True
        try:
            self._take_messages()
        finally:
            self._draining = False
        self._on_idle()
        self._look_again()

    def _take_messages(self) -> None:
        for _ in range(_DRAIN_AT_ONCE):
            if not self._has_message():  # an exception for each batch's end would cost more
                return
            try:
                parts = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self._on_message(parts)
            if self._stopped:
                return

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _look_again(self) -> None:
        """ZeroMQ signals edges: what came during a send or behind a full batch is not signalled."""
        if self._draining or self._stopped:
            return
        if self._has_message():
            self._loop.call_soon(self.drain)

    def stop(self) -> None:
        """Hands out nothing any more; what is sent still goes. May be called again."""
        self._stopped = True
        self._loop.remove_reader(self._descriptor)

    def close(self) -> None:
        self.stop()
        self._socket.close()
