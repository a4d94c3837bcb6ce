"""SIGTERM and SIGINT as something that a ZeroMQ poller can wait for."""

import signal
import socket
from types import FrameType


class StopSignal:
    """Catches SIGTERM and SIGINT from its creation on. Made and used by the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # Python runs handlers between bytecodes only; the byte written here ends the poll.
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @property
    def descriptor(self) -> int:
        """Readable after a signal until `clear`."""
        return self._reader.fileno()

    def clear(self) -> None:
        """Takes the bytes that signals have written."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
