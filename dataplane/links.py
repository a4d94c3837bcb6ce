"""The worker's sockets to the control plane, and the pair that joins its two threads."""

import zmq

from octavo.common.curve import ClientKeys
from octavo.common.dialing import Dialer
from octavo.common.loop_socket import Context, Socket
from octavo.proto.wire import MAX_FRAME_BYTES

HIGH_WATER_MARK = 1000  # frames; a worker has at most a few plans and results under way
_LINGER_MS = 1000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 1000
_PING_MS, _PING_TIMEOUT_MS = 2000, 10_000
_THREADS_ADDRESS = "inproc://threads"


class Line:
    """A connection to the control plane that queues nothing while it is not there.

    Its `socket` and `monitor` are polled by the one thread that uses it, which calls `watch` when the
    monitor is readable, and `redial` from time to time.
    """

    def __init__(
        self, context: Context, address: str, identity: bytes, keys: ClientKeys | None
    ) -> None:
        """`address` is ``tcp://host:port``; `identity` is what plans and answers are sent to."""
        self.socket = _dealer(context, identity)
        self._dialer = Dialer(self.socket, address, "worker", keys)
        self.monitor: Socket = self._dialer.monitor
        self.redial = self._dialer.redial
        self._dialer.connect()

    def watch(self) -> None:
        """Logs what has become of the connection."""
        while self.monitor.poll(0):
            self._dialer.take(self.monitor.recv_multipart())

    def close(self) -> None:
        self._dialer.close()
        self.socket.close()


def _dealer(context: Context, identity: bytes) -> Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS)
    socket.set_hwm(HIGH_WATER_MARK)
    return socket


def thread_pair(context: Context) -> tuple[Socket, Socket]:
    """Two joined ends, one for each thread."""
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for end in ends:
        end.setsockopt(zmq.LINGER, 0)
        end.set_hwm(HIGH_WATER_MARK)
    ends[0].bind(_THREADS_ADDRESS)
    ends[1].connect(_THREADS_ADDRESS)
    return ends


def send(socket: Socket, frame: bytes) -> bool:
    """Sends without waiting; False when there is no connection or its queue is full."""
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
