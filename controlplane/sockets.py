"""A ZeroMQ ROUTER on the event loop that never drops silently and cannot starve it."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from octavo.proto.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 10_000  # frames per peer and direction
_DRAIN_AT_ONCE = 1_000  # frames taken before other events get their turn


class Unreachable(Exception):  # noqa: N818 (an event that callers handle, not a fault)
    """The peer is not connected, or does not read what it is sent."""


class RouterSocket:
    """Binds, hands every frame to `on_frame(identity, frame)`, and `on_idle()` after each batch."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_frame: Callable[[bytes, bytes], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.bind(address)
        self._on_frame, self._on_idle = on_frame, on_idle
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)
        self._draining = False
        self._loop.call_soon(self.drain)

    def send(self, identity: bytes, frame: bytes) -> None:
        """Sends without waiting. Raises Unreachable."""
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unreachable(str(error)) from error
        finally:
            self._look_again()

    def drain(self) -> None:
        """Handles what has arrived."""
        if self._draining:  # a handler that sends must not start a second drain
            return
        self._draining = True
        try:
            self._take_frames()
        finally:
            self._draining = False
        self._on_idle()
        self._look_again()

    def _take_frames(self) -> None:
        for _ in range(_DRAIN_AT_ONCE):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                log.warning("a message of %d parts was dropped", len(parts))
                continue
            self._on_frame(parts[0], parts[1])

    def _look_again(self) -> None:
        """ZeroMQ signals edges: what came during a send or behind a full batch is not signalled."""
        if self._socket.closed or self._draining:
            return
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close()
