"""Real processes under measurement: start, wait for a probe, memory, stop."""

import contextlib
import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import psutil

_POLL_SECONDS = 0.02
_STOP_SECONDS = 30.0


class StartError(Exception):
    """A process that did not become ready. The text ends with its last log lines."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class Process:
    """One `octavo` process, started when made; its log is kept for error messages."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop()
        command = [sys.executable, "-m", "octavo.frontend.cli", name, *arguments]
        self.started = time.perf_counter()
        self._popen = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_for(self, port: int, path: str, timeout: float) -> float:
        """Seconds from start until `path` answers 200. Raises StartError."""
        while not _answers(port, path):
            if self._popen.poll() is not None:
                raise StartError(self._complaint(f"exited with {self._popen.returncode}"))
            if time.perf_counter() - self.started > timeout:
                raise StartError(self._complaint(f"gave no 200 on {path} within {timeout:g} s"))
            time.sleep(_POLL_SECONDS)
        return time.perf_counter() - self.started

    def resident_bytes(self) -> int:
        """Memory resident now, of the process and its children."""
        parent = psutil.Process(self._popen.pid)
        family = [parent, *parent.children(recursive=True)]
        return sum(int(process.memory_info().rss) for process in family)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to one that does not obey."""
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._log.close()

    def _complaint(self, what: str) -> str:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-10:]
        return "\n  ".join([f"octavo {self.name} {what}:", *tail])


@contextlib.contextmanager
def running(name: str, arguments: Sequence[str]) -> Iterator[Process]:
    """A process that is stopped at the end of the block."""
    process = Process(name, arguments)
    try:
        yield process
    finally:
        process.stop()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not there yet
    finally:
        connection.close()
