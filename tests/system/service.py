"""Starts real processes for tests, each set on ports of its own."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ports import free_ports

PORTS = (
    "gateway_port",
    "worker_port",
    "controlplane_probe_port",
    "worker_probe_port",
    "grpc_port",
    "http_port",
)


def octavo(command: str, options: dict[str, object], log: Path) -> subprocess.Popen[bytes]:
    """Starts one `octavo` command with its output going to `log`."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    arguments = [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]
    # One thread computes: two services of a test run must not fight for two cores.
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "octavo.frontend.cli", command, *arguments],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def get(url: str) -> tuple[int, str]:
    """Status and body of an HTTP GET; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def wait_for(condition: object, what: str, timeout: float = 120.0) -> None:
    """Polls until `condition()` is true; fails with `what` when it takes too long."""
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not after {timeout} s: {what}"
        time.sleep(0.05)


@dataclass
class Service:
    """A whole service under `octavo serve`. Use as a context manager."""

    log: Path
    options: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.options = {**dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), **self.options}
        self.process = octavo("serve", self.options, self.log)
        wait_for(self._is_ready_or_dead, "the service is ready")
        assert self.process.poll() is None, self.log.read_text()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Stops the service in order; returns its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def _is_ready_or_dead(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            return True
        if "tls_cert" in self.options:  # its supervisor can tell
            return "Octavo is ready" in self.log.read_text()
        return get(f"{self.http}/ready")[0] == 200

    @property
    def grpc_port(self) -> int:
        return int(str(self.options["grpc_port"]))

    @property
    def http_port(self) -> int:
        return int(str(self.options["http_port"]))

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def base_url(self) -> str:
        return f"{self.http}/v1"

    def metrics(self) -> dict[str, float]:
        """The control plane's metrics by name and labels."""
        return read_metrics(int(str(self.options["controlplane_probe_port"])))

    def worker_metrics(self) -> dict[str, float]:
        return read_metrics(int(str(self.options["worker_probe_port"])))

    def is_idle(self) -> bool:
        return is_idle(self.metrics())

    def wait_until_idle(self) -> None:
        wait_for(self.is_idle, "every block is free", 30)


def read_metrics(port: int) -> dict[str, float]:
    """What a probe port's /metrics says."""
    _, body = get(f"http://127.0.0.1:{port}/metrics")
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", body, re.M)}


def is_idle(controlplane: dict[str, float]) -> bool:
    """Whether these metrics say that nothing waits or runs, and that no block is held."""
    held = [v for k, v in controlplane.items() if "octavo_kv_blocks{" in k and 'state="used"' in k]
    groups = [v for k, v in controlplane.items() if k.startswith("octavo_sequence_groups")]
    return bool(groups) and not any(groups) and not any(held)
