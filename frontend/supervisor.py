"""Starts the three kinds of process on one machine, waits for them, and stops them all."""

import http.client
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from octavo.common.lifetime import PARENT_VARIABLE
from octavo.common.options import to_arguments
from octavo.controlplane.options import ControlPlaneOptions
from octavo.dataplane.options import WorkerOptions
from octavo.frontend.options import GatewayOptions

log = logging.getLogger("octavo.serve")

_POLL = 0.1  # seconds


class ChildFailed(Exception):  # noqa: N818 (what happened, for the operator)
    """A child exited although nobody asked it to; its own log lines say why."""


@dataclass(frozen=True)
class ServeOptions:
    """What all the processes of one machine take together."""

    controlplane: ControlPlaneOptions
    worker: WorkerOptions
    gateway: GatewayOptions


@dataclass
class Supervisor:
    """The processes of one service. Use it as a context manager: leaving it stops them all."""

    options: ServeOptions
    stop_timeout: float = 20.0  # seconds from SIGTERM to SIGKILL, for each
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopping: bool = False

    def __enter__(self) -> Self:
        self.start("controlplane", self.options.controlplane)
        self.start("worker", self.options.worker)
        self.start("gateway", self.options.gateway)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, options: Any) -> None:
        """Starts one process, which dies when this one does."""
        command = [sys.executable, "-m", "octavo.frontend.cli", name, *to_arguments(options)]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        # A group of its own: Ctrl-C reaches this process alone, which then stops them in order.
        self.children[name] = subprocess.Popen(command, env=environment, process_group=0)

    def wait_until_ready(self, timeout: float) -> None:
        """Returns when the gateway can serve.

        Raises:
            ChildFailed: a process exited.
            TimeoutError: it took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the service is not ready after {timeout:g} s")
            if self.stopping:
                return
            time.sleep(_POLL)

    def is_ready(self) -> bool:
        """Whether the gateway says that it can serve."""
        gateway = self.options.gateway
        connection = http.client.HTTPConnection(gateway.http_host, gateway.http_port, timeout=2.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def check(self) -> None:
        """Raises ChildFailed if a process has exited."""
        for name, child in self.children.items():
            if child.poll() is not None and not self.stopping:
                raise ChildFailed(f"the {name} exited with status {child.returncode}")

    def run_until_stopped(self) -> None:
        """Watches the processes until `stopping` is set. Raises ChildFailed."""
        while not self.stopping:
            self.check()
            time.sleep(_POLL)

    def stop(self) -> None:
        """Ends every process: the gateway first, so that streams can end in order."""
        self.stopping = True
        for name in reversed(list(self.children)):
            child = self.children[name]
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            try:
                child.wait(self.stop_timeout)
            except subprocess.TimeoutExpired:
                log.warning("the %s did not stop in time and is killed", name)
                child.kill()
                child.wait()

    def stop_on_signals(self) -> None:
        """SIGINT and SIGTERM set `stopping`."""

        def on_signal(number: int, frame: object) -> None:
            self.stopping = True

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
