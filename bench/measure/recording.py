"""What a control plane tells its worker, and the answers, written down on their way."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import zmq

from octavo.proto.plan import Fault, Plan, Result
from octavo.proto.session import Reset
from octavo.proto.wire import MAX_FRAME_BYTES, ProtocolError, unpack

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_IN_FLIGHT = 2  # plans that may be without a result at any time
_POLL_MS = 100  # how soon the forwarder sees that it shall stop


class RecordingError(Exception):
    """A recording that cannot be made or replayed. The text says why."""


@dataclass
class Recording:
    """The frames of one epoch, in order. Plans from number `first` on belong to the measured run."""

    reset: bytes = b""
    plans: list[bytes] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)
    first: int = 0

    def save(self, path: Path) -> None:
        """Raises OSError."""
        frames = [self.reset, self.plans, self.results, self.first]
        path.write_bytes(msgpack.packb(frames))  # type: ignore[no-untyped-call]

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Raises OSError, and RecordingError when the file is none of `save`."""
        try:
            reset, plans, results, first = msgpack.unpackb(path.read_bytes())  # type: ignore
        except (ValueError, TypeError) as error:
            raise RecordingError(f"{path} is not a recording of plans") from error
        return cls(reset, plans, results, first)

    def unpack(self) -> tuple[Reset, list[Plan], list[Result]]:
        """The messages, without the plans that were in flight when the recording ended.

        Raises ProtocolError, and RecordingError unless each other plan has its result.
        """
        plans = [Plan.unpack(frame) for frame in self.plans]
        results = [Result.unpack(frame) for frame in self.results]
        numbers = list(range(len(plans)))
        answered = len(results)
        if [p.number for p in plans] != numbers or [r.number for r in results] != numbers[:answered]:
            raise RecordingError("plans and results are not numbered 0, 1, 2, ...: the run had faults")
        if len(plans) - answered > _IN_FLIGHT:
            raise RecordingError(f"only {answered} of {len(plans)} plans have results")
        return Reset.unpack(self.reset), plans[:answered], results


class Forwarder(threading.Thread):
    """Stands between a worker, which connects to `port`, and its control plane; records both.

    The control plane sees the worker's own routing ids. One worker at a time; its next epoch begins a
    new recording.
    """

    def __init__(self, controlplane_port: int) -> None:
        super().__init__(name="forwarder", daemon=True)
        self._context: Context = zmq.Context()
        self._address = f"tcp://127.0.0.1:{controlplane_port}"
        self._worker = self._context.socket(zmq.ROUTER)
        self._worker.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _set_limits(self._worker)
        self.port = self._worker.bind_to_random_port("tcp://127.0.0.1")
        self._upstream: dict[bytes, Socket] = {}
        self._frames: list[bytes] = []  # read only when all is over: reading takes time
        self._marked = 0
        self._stopped = threading.Event()

    def mark(self) -> None:
        """From here on plans belong to the measured run."""
        self._marked = len(self._frames)

    def stop(self) -> Recording:
        """Ends the thread. Returns what was recorded since the last reset."""
        self._stopped.set()
        self.join()
        return recording_of(self._frames, self._marked)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._worker, zmq.POLLIN)
        while not self._stopped.is_set():
            events = dict(poller.poll(_POLL_MS))
            if self._worker in events:
                self._from_worker(poller)
            for identity, socket in list(self._upstream.items()):
                if socket in events:
                    self._from_controlplane(identity, socket)
        self._context.destroy(linger=0)

    def _from_worker(self, poller: zmq.Poller) -> None:
        identity, *frames = self._worker.recv_multipart()
        if identity not in self._upstream:
            self._open(identity, poller)
        self._upstream[identity].send_multipart(frames)
        self._frames += frames

    def _open(self, identity: bytes, poller: zmq.Poller) -> None:
        """Connects both of a worker's sockets: the control plane sends plans to one that is silent."""
        for kind in (b"d", b"c"):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, kind + identity[1:])
            _set_limits(socket)
            socket.connect(self._address)
            self._upstream[kind + identity[1:]] = socket
            poller.register(socket, zmq.POLLIN)

    def _from_controlplane(self, identity: bytes, socket: Socket) -> None:
        frames = socket.recv_multipart()
        self._worker.send_multipart([identity, *frames])
        self._frames += frames


def recording_of(frames: Sequence[bytes], marked: int) -> Recording:
    """The last epoch among a connection's frames; frame number `marked` begins the measured run."""
    recording = Recording()
    for index, frame in enumerate(frames):
        if index == marked:
            recording.first = len(recording.plans)
        try:
            message = unpack(frame, Reset, Plan, Result, Fault)
        except ProtocolError:
            continue  # registration and heartbeats
        if isinstance(message, Reset):
            recording = Recording(reset=frame)
        elif isinstance(message, Plan):
            recording.plans.append(frame)
        else:
            recording.results.append(frame)
    return recording


def _set_limits(socket: Socket) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
