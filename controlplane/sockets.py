"""ZeroMQ sockets on the event loop; a ROUTER that never drops silently and cannot starve the loop."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from octavo.common.dialing import HANDSHAKE_MS
from octavo.common.logs import LimitedLog
from octavo.proto.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

HIGH_WATER_MARK = 10_000  # frames per peer and direction
_DRAIN_AT_ONCE = 1_000  # messages taken before other events get their turn

# As plain numbers: arithmetic on the library's enumerations takes as long as a small message.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class Unreachable(Exception):  # noqa: N818 (an event that callers handle, not a fault)
    """The peer is not connected, or does not read what it is sent."""


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
        self._draining = False
        self._loop.call_soon(self.drain)

    def send(self, parts: list[bytes]) -> None:
        """Sends without waiting. Raises zmq.ZMQError."""
        try:
            self._socket.send_multipart(parts, _NOBLOCK)
        finally:
            self._look_again()

    def drain(self) -> None:
        """Handles what has arrived."""
        if self._draining or self._socket.closed:  # a handler that sends must not start a second drain
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

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _look_again(self) -> None:
        """ZeroMQ signals edges: what came during a send or behind a full batch is not signalled."""
        if self._socket.closed or self._draining:
            return
        if self._has_message():
            self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close()


class RouterSocket:
    """Binds, hands every frame to `on_frame(identity, frame)`, and `on_idle()` after each batch."""

    def __init__(
        self,
        context: Context,
        address: str,
        on_frame: Callable[[bytes, bytes], None],
        on_idle: Callable[[], None],
        guard: Callable[[Socket], None] = lambda socket: None,
    ) -> None:
        """`guard` is shown the socket before it is bound, to say who may connect."""
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.set_hwm(HIGH_WATER_MARK)
        guard(socket)
        socket.bind(address)
        self._on_frame = on_frame
        self._limited = LimitedLog(log)
        self._loop_socket = LoopSocket(socket, self._on_message, on_idle)

    def send(self, identity: bytes, frame: bytes) -> None:
        """Sends without waiting. Raises Unreachable."""
        try:
            self._loop_socket.send([identity, frame])
        except zmq.ZMQError as error:
            raise Unreachable(str(error)) from error

    def drain(self) -> None:
        """Handles what has arrived."""
        self._loop_socket.drain()

    def _on_message(self, parts: list[bytes]) -> None:
        if len(parts) == 2:
            self._on_frame(parts[0], parts[1])
        else:
            self._limited.warning("parts", "a message of %d parts was dropped", len(parts))

    def close(self) -> None:
        self._loop_socket.close()
