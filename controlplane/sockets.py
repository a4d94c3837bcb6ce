"""A ROUTER on the event loop that never drops silently and cannot starve the loop."""

import logging
from collections.abc import Callable

import zmq

from octavo.common.dialing import HANDSHAKE_MS
from octavo.common.logs import LimitedLog
from octavo.common.loop_socket import Context, LoopSocket, Socket
from octavo.proto.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 10_000  # frames per peer and direction


class Unreachable(Exception):  # noqa: N818 (an event that callers handle, not a fault)
    """The peer is not connected, or does not read what it is sent."""


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
