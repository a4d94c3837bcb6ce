"""Real processes under measurement: start, wait for a probe, memory, stop."""

import contextlib
import http.client
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_POLL_SECONDS = 0.02
_STOP_SECONDS = 30.0
_ORPHAN_SECONDS = 5.0  # for children whose parent has ended


class StartError(Exception):
    """A process that did not become ready. The text ends with its last log lines."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def octavo_command(name: str, arguments: Sequence[str]) -> list[str]:
    """The command line of `octavo NAME` with this Python and this checkout."""
    return [sys.executable, "-m", "octavo.frontend.cli", name, *arguments]


def stop_on_sigterm() -> None:
    """Lets SIGTERM end this process as an error does, so that what it has started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Process:
    """One process, started when made; its log is kept for error messages."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop()
        self.started = time.perf_counter()
        try:
            self._popen = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            self._log.close()
            raise StartError(f"{name}: {shlex.join(command)}: {error.strerror}") from error

    def wait_for(self, port: int, path: str, timeout: float) -> float:
        """Seconds from start until `path` answers 200. Raises StartError."""
        while not _answers(port, path):
            if self._popen.poll() is not None:
                raise StartError(self._complaint(f"exited with {self._popen.returncode}"))
            if time.perf_counter() - self.started > timeout:
                raise StartError(self._complaint(f"gave no 200 on {path} within {timeout:g} s"))
            time.sleep(_POLL_SECONDS)
        return time.perf_counter() - self.started

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants; empty when it has ended."""
        try:
            parent = psutil.Process(self._popen.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """Memory resident now, of the process and its children."""
        return sum(int(process.memory_info().rss) for process in self.family())

    def peak_bytes(self) -> int:
        """The most memory that has been resident, of the process alone; Linux only."""
        lines = Path(f"/proc/{self._popen.pid}/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to one that does not obey and to children that outlive it."""
        family = self.family()
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        _end(family[1:])
        self._log.close()

    def _complaint(self, what: str) -> str:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-10:]
        return "\n  ".join([f"{self.name} {what}:", *tail])


@contextlib.contextmanager
def running(name: str, command: Sequence[str]) -> Iterator[Process]:
    """A process that is stopped at the end of the block."""
    process = Process(name, command)
    try:
        yield process
    finally:
        process.stop()


def _end(orphans: Sequence[psutil.Process]) -> None:
    """Children have had their time to stop while their parent did."""
    for action in ("terminate", "kill"):
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(orphan, action)()
        orphans = psutil.wait_procs(orphans, timeout=_ORPHAN_SECONDS)[1]


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not there yet
    finally:
        connection.close()
