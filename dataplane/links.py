"""The worker's sockets to the control plane, and the pair that joins its two threads."""

import zmq

from octavo.proto.wire import MAX_FRAME_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

HIGH_WATER_MARK = 1000  # frames; a worker has at most a few plans and results under way
_LINGER_MS = 1000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 1000
_PING_MS, _PING_TIMEOUT_MS = 2000, 10_000
_THREADS_ADDRESS = "inproc://threads"


def connect(context: Context, host: str, port: int, identity: bytes) -> Socket:
    """A DEALER to the control plane that queues nothing while there is no connection."""
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
    socket.connect(f"tcp://{host}:{port}")
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
