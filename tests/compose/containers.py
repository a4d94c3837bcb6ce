"""A service in containers: the compose file as a user runs it, and what the engine says of it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from service import get, wait_for

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "compose"
PROJECT = "octavo-test"


def run(*command: str, check: bool = True, **environment: str) -> str:
    """What a command printed. Fails with what it complained about, unless `check` is false."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


class Containers:
    """The containers of one compose project."""

    def __init__(self, grpc_port: int, http_port: int, tensor_parallel: int = 1) -> None:
        self.grpc_port, self.http_port = grpc_port, http_port
        self._environment = {
            "OCTAVO_GRPC_PORT": str(grpc_port),
            "OCTAVO_HTTP_PORT": str(http_port),
            "OCTAVO_TENSOR_PARALLEL": str(tensor_parallel),
            "OCTAVO_KV_MEMORY": "128MiB",
            "OCTAVO_THREADS": "1",  # several workers share the cores of this machine
        }

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def compose(self, *arguments: str) -> str:
        return run("docker-compose", "--project-name", PROJECT, *arguments, **self._environment)

    def up(self, workers: int = 1) -> None:
        """Starts what does not run; a container that runs is left alone."""
        self.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", f"worker={workers}")

    def ids(self, service: str) -> list[str]:
        """Ids of a service's containers, stopped ones included."""
        label = f"label=com.docker.compose.project={PROJECT}"
        kind = f"label=com.docker.compose.service={service}"
        return run("docker", "ps", "--all", "--quiet", "--filter", label, "--filter", kind).split()

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(run("docker", "inspect", container))
        assert isinstance(found, dict)
        return found

    def kill_host_process(self, container: str) -> None:
        """As the kernel would end it when memory runs out: the engine is not asked."""
        os.kill(int(self.inspect(container)["State"]["Pid"]), signal.SIGKILL)

    def restarts(self, container: str) -> int:
        """How often the restart policy has brought it back."""
        return int(self.inspect(container)["RestartCount"])

    def exit_codes(self, service: str, since: float) -> list[int]:
        """Of a service's containers that ended from `since` (Unix seconds) on, removed ones too."""
        filters = (
            "event=die",
            f"label=com.docker.compose.project={PROJECT}",
            f"label=com.docker.compose.service={service}",
        )
        times = ("--since", str(since), "--until", str(time.time()))
        shown = ("--format", "{{.Actor.Attributes.exitCode}}")
        named = [part for name in filters for part in ("--filter", name)]
        return [int(code) for code in run("docker", "events", *times, *shown, *named).split()]

    def is_ready(self) -> bool:
        return get(f"http://127.0.0.1:{self.http_port}/ready")[0] == 200

    def wait_until_ready(self, workers: int = 1) -> None:
        """Until the gateway serves, and every worker says that it is healthy."""
        wait_for(self.is_ready, "the gateway is ready", 180)
        wait_for(lambda: self.healthy("worker") == workers, f"{workers} workers are healthy", 180)

    def healthy(self, service: str) -> int:
        states = [self.inspect(container)["State"] for container in self.ids(service)]
        return sum(state.get("Health", {}).get("Status") == "healthy" for state in states)

    def execute(self, container: str, *command: str, check: bool = True) -> str:
        return run("docker", "exec", container, *command, check=check)

    def save_logs(self, name: str) -> None:
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{name}.log").write_text(self.compose("logs", "--no-color", "--timestamps"))
