"""Starts the processes of a service on one machine, starts them again when they crash, stops them."""

import dataclasses
import http.client
import logging
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from octavo.common.lifetime import PARENT_VARIABLE
from octavo.common.options import to_arguments
from octavo.controlplane.options import ControlPlaneOptions
from octavo.dataplane.options import WorkerOptions
from octavo.frontend.options import GatewayOptions

log = logging.getLogger("octavo.serve")

_POLL = 0.1  # seconds
_STOP_SECONDS = 20.0  # from SIGTERM to SIGKILL, beside what a gateway takes to drain
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a crashed process is started again
_STABLE_SECONDS = 60.0  # after so long a crash counts as the first
_REFUSALS = (1, 2)  # exit statuses that mean: not with these options


class ChildFailed(Exception):  # noqa: N818 (what happened, for the operator)
    """A process cannot run as it was told to; its own log lines say why."""


@dataclass(frozen=True)
class ServeOptions:
    """What all the processes of one machine take together."""

    controlplane: ControlPlaneOptions
    worker: WorkerOptions
    gateway: GatewayOptions
    workers: int = 1  # gangs, each of `worker.tensor_parallel` processes


class Child:
    """One process, and when it may be started again."""

    def __init__(self, name: str, command: str, options: Any, stop_seconds: float) -> None:
        self.name, self._stop_seconds = name, stop_seconds
        self._command = [sys.executable, "-m", "octavo.frontend.cli", command, *to_arguments(options)]
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0  # monotonic seconds
        self._start_at: float | None = None  # set while it waits for its next start
        self._crashes = 0  # in a row

    def start(self) -> None:
        """It dies when this process does."""
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        self._started, self._start_at = time.monotonic(), None
        # A group of its own: Ctrl-C reaches this process alone, which then stops them in order.
        self._process = subprocess.Popen(self._command, env=environment, process_group=0)

    def exit_status(self) -> int | None:
        """Of a process that has ended and is not yet due to be started again."""
        if self._process is None or self._start_at is not None:
            return None
        return self._process.poll()

    def plan_restart(self) -> float:
        """It has crashed. Returns the seconds until it is started again."""
        now = time.monotonic()
        self._crashes = 0 if now - self._started > _STABLE_SECONDS else self._crashes
        pause: float = min(_FIRST_PAUSE * 2**self._crashes, _LONGEST_PAUSE)
        self._crashes += 1
        self._start_at = now + pause
        return pause

    def start_if_due(self) -> None:
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self.start()

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it has ended, by force if it takes too long."""
        if self._process is None:
            return
        try:
            self._process.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            log.warning("the %s did not stop in time and is killed", self.name)
            self._process.kill()
            self._process.wait()


class Supervisor:
    """The processes of one service. Use it as a context manager: leaving it stops them all."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.stopping = False
        self._was_ready = False
        self._controlplane = Child("controlplane", "controlplane", options.controlplane, _STOP_SECONDS)
        self._workers = list(_workers(options))
        patience = _STOP_SECONDS + options.gateway.drain_timeout
        self._gateway = Child("gateway", "gateway", options.gateway, patience)
        self._children = [self._controlplane, *self._workers, self._gateway]

    def __enter__(self) -> Self:
        for child in self._children:
            child.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout: float) -> None:
        """Returns when the gateway can serve.

        Raises:
            ChildFailed: a process refuses its options.
            TimeoutError: it took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            self.look_after_children()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the service is not ready after {timeout:g} s")
            if self.stopping:
                return
            time.sleep(_POLL)
        self._was_ready = True

    def is_ready(self) -> bool:
        """Whether the gateway says that it can serve."""
        connection = _connection(self.options.gateway)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def look_after_children(self) -> None:
        """Starts again what has crashed, after a while that grows with each crash.

        Raises ChildFailed for a process that refuses its options: one that ends with an error of its
        own before the service was ever ready.
        """
        for child in self._children:
            status = child.exit_status()
            if status is not None and not self.stopping:
                if status in _REFUSALS and not self._was_ready:
                    raise ChildFailed(f"the {child.name} exited with status {status}")
                pause = child.plan_restart()
                text = "the %s exited with status %d: it is started again in %g s"
                log.error(text, child.name, status, pause)
            child.start_if_due()

    def run_until_stopped(self) -> None:
        """Looks after the processes until `stopping` is set."""
        while not self.stopping:
            self.look_after_children()
            time.sleep(_POLL)

    def stop(self) -> None:
        """Ends every process: the gateway first, so that streams can end in order."""
        self.stopping = True
        for group in ([self._gateway], self._workers, [self._controlplane]):
            for child in group:
                child.terminate()
            for child in group:
                child.wait()

    def stop_on_signals(self) -> None:
        """SIGINT and SIGTERM set `stopping`."""

        def on_signal(number: int, frame: object) -> None:
            self.stopping = True

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)


def _workers(options: ServeOptions) -> Iterator[Child]:
    """Each with a probe port and, where there are several, a seat of its own, kept through restarts."""
    ranks = options.worker.tensor_parallel
    count = options.workers * ranks
    if count == 1:
        yield Child("worker", "worker", options.worker, _STOP_SECONDS)
        return
    for number in range(count):
        own = dataclasses.replace(
            options.worker,
            worker_probe_port=options.worker.worker_probe_port + number,
            gang=number // ranks,
            rank=number % ranks,
            threads=options.worker.threads or max(1, len(os.sched_getaffinity(0)) // count),
        )
        yield Child(f"worker-{number}", "worker", own, _STOP_SECONDS)


def _connection(gateway: GatewayOptions) -> http.client.HTTPConnection:
    if gateway.tls_cert is None:
        return http.client.HTTPConnection(gateway.http_host, gateway.http_port, timeout=2.0)
    # It is our own gateway that answers, whatever name its certificate is for.
    context = ssl.create_default_context(cafile=gateway.tls_cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(
        gateway.http_host, gateway.http_port, timeout=2.0, context=context
    )
