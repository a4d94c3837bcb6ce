"""A socket that connects to the control plane: keys, the reasons of failed handshakes, another try.

ZeroMQ itself tries again when nobody answers, but gives a connection up for good once the other end
has refused a key or speaks another mechanism. Then it has to be told to connect again.
"""

import errno
import logging
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from octavo.common.curve import ClientKeys
from octavo.common.logs import LimitedLog

log = logging.getLogger(__name__)

HANDSHAKE_MS = 10_000  # a connection that is not shaken hands on by then is closed
REDIAL_SECONDS = 1.0  # from a failure to the next try
_LOG_SECONDS = 5.0
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
EVENTS = _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Dialer:
    """Connects one DEALER of a `worker` or `gateway`, and watches its handshakes."""

    def __init__(self, socket: Any, address: str, name: str, keys: ClientKeys | None) -> None:
        """Sets the socket up; `connect` connects it. `address`: ``tcp://host:port``."""
        self._socket, self._address = socket, address
        self._name, self._keys = name, keys
        self._given_up: float | None = None  # monotonic seconds; since then ZeroMQ does not try again
        self._limited = LimitedLog(log, _LOG_SECONDS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if keys is not None:
            keys.use(socket)
        self.monitor: Any = socket.get_monitor_socket(EVENTS)

    def connect(self) -> None:
        self._socket.connect(self._address)

    def take(self, parts: list[bytes]) -> int:
        """Takes a message of the monitor, logs what went wrong, and returns the event."""
        message = parse_monitor_message(parts)
        event, value = int(message["event"]), int(message["value"])
        if event & _FAILURES:
            self._limited.warning(str(event), "%s", self._explain(event, value))
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._given_up = time.monotonic()
        return event

    def redial(self) -> None:
        """Connects again if ZeroMQ gave up a while ago. To be called from time to time."""
        if self._given_up is None or time.monotonic() - self._given_up < REDIAL_SECONDS:
            return
        self._given_up = None
        try:
            self._socket.disconnect(self._address)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # there is nothing left of the connection
                raise
        self._socket.connect(self._address)

    def close(self) -> None:
        """Ends the watch; to be called before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)

    def _explain(self, event: int, value: int) -> str:
        place, name, keys = f"the control plane at {self._address}", self._name, self._keys
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            folder = keys.folder if keys else ""
            return (
                f"{place} refuses this {name}'s key: give it the {name}.public that belongs to "
                f"{folder}/{name}.secret and restart it; and see that this is its port for {name}s"
            )
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and keys is None:
            return f"{place} wants CURVE keys: start this {name} with --curve-keys FOLDER"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return (
                f"{place} has no CURVE keys, and this {name} has: start it with --curve-keys too; "
                "nothing is sent in the clear"
            )
        if keys is None:
            return f"{place} ended the handshake: if this goes on, see that it is one and wants no keys"
        return (
            f"{place} ended the handshake: if this goes on, its key is not the one in "
            f"{keys.folder}/controlplane.public, or it has none"
        )
