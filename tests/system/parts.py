"""A service whose processes are started one by one; each can be killed, paused and restarted."""

import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from ports import free_ports
from service import PORTS, get, is_idle, octavo, read_metrics, wait_for

_TAKES = {
    "controlplane": ("gateway_port", "worker_port", "controlplane_probe_port"),
    "worker": ("worker_port", "worker_probe_port"),
    "gateway": ("gateway_port", "grpc_port", "http_port"),
}
_OWN = ("worker_probe_port", "grpc_port", "http_port")  # of each worker and gateway its own


class Parts:
    """One control plane, and workers and gateways named ``worker``, ``worker2``, ... Use as a context
    manager: entering starts them and waits until they serve, leaving stops them in order."""

    def __init__(
        self,
        folder: Path,
        workers: int = 1,
        gateways: int = 1,
        options: dict[str, dict[str, object]] | None = None,
    ) -> None:
        """`options` of each kind of process."""
        self.folder = folder
        self.options = options or {}
        self.names = ["controlplane", *_names("worker", workers), *_names("gateway", gateways)]
        numbered = [f"{port}{i}" for port in _OWN for i in range(2, max(workers, gateways) + 1)]
        names = [*PORTS, *numbered]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                self.start(name)
            wait_for(self.is_ready, "the service is ready")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str) -> None:
        kind, number = name.rstrip("0123456789"), name.lstrip("abcdefghijklmnopqrstuvwxyz")
        ports = {port: self.port(port, number) for port in _TAKES[kind]}
        options = {**ports, **self.options.get(kind, {})}
        self.processes[name] = octavo(kind, options, self.folder / name)

    def port(self, name: str, number: str = "") -> int:
        """A port of the process with this number in its name."""
        return self.ports[name + number if name in _OWN else name]

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def pause(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def is_ready(self) -> bool:
        """Whether every gateway says so."""
        gateways = [name for name in self.names if name.startswith("gateway")]
        return all(self.probe(name)[0] == 200 for name in gateways)

    def probe(self, gateway: str = "gateway", path: str = "/ready") -> tuple[int, str]:
        """What a gateway answers over HTTP."""
        port = self.port("http_port", gateway.removeprefix("gateway"))
        return get(f"http://127.0.0.1:{port}{path}")

    def targets(self) -> list[str]:
        """Where the gateways serve gRPC."""
        numbers = [n.removeprefix("gateway") for n in self.names if n.startswith("gateway")]
        return [f"127.0.0.1:{self.port('grpc_port', number)}" for number in numbers]

    def metrics(self) -> dict[str, float]:
        """Those of the control plane."""
        return read_metrics(self.ports["controlplane_probe_port"])

    def is_idle(self) -> bool:
        return is_idle(self.metrics())

    def is_clean(self) -> bool:
        """Idle, and no gateway has a request that is not finished."""
        numbers = [n.removeprefix("gateway") for n in self.names if n.startswith("gateway")]
        live = [read_metrics(self.port("http_port", n)).get("octavo_live_requests") for n in numbers]
        return self.is_idle() and not any(count != 0.0 for count in live)

    def stop(self) -> dict[str, int]:
        """SIGTERM to all, gateways first; what each returned."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
        codes = {}
        for name in reversed(self.names):
            process = self.processes.get(name)
            if process is not None:
                codes[name] = _end(process)
        return codes


def _end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(20)
    finally:
        process.kill()


def _names(kind: str, count: int) -> list[str]:
    return [kind, *(f"{kind}{i}" for i in range(2, count + 1))]
