"""The manifests' pods without a cluster: each as one container, with what its Deployment says.

Secrets and settings are laid as the kubelet lays them, services are names on a network. What the
engine has no word for (probes, disruption budgets, autoscaling) is not here.
"""

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from containers import ROOT, run

NETWORK = "octavo-test-pods"
GROUP = 10001  # fsGroup


class Pods:
    """One container per Deployment. Use as a context manager: entering starts them."""

    def __init__(
        self, folder: Path, secrets: dict[str, dict[str, bytes]], ports: dict[str, int]
    ) -> None:
        """
        Args:
            folder: where to lay the secrets' files.
            secrets: of each secret, its entries.
            ports: ports of this machine by the names of container ports: where to publish those.
        """
        self._folder, self._secrets, self._ports = folder, secrets, ports
        objects = [
            value
            for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml")
            for value in yaml.safe_load_all(path.read_text())
        ]
        self._settings: dict[str, str] = next(o["data"] for o in objects if o["kind"] == "ConfigMap")
        self._specs: dict[str, dict[str, Any]] = {
            o["metadata"]["name"]: o["spec"]["template"]["spec"]
            for o in objects
            if o["kind"] == "Deployment"
        }

    def __enter__(self) -> Self:
        self.remove()
        run("docker", "network", "create", NETWORK)
        for name, spec in self._specs.items():
            self._start(name, spec)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            for name in self._specs:
                print(name, run("docker", "logs", _container(name), check=False))
        self.remove()

    def stop(self) -> dict[str, int]:
        """Stops all in order; their exit statuses by name."""
        for name in self._specs:
            run("docker", "stop", "--time", "30", _container(name))
        status = ("docker", "inspect", "--format", "{{.State.ExitCode}}")
        return {name: int(run(*status, _container(name))) for name in self._specs}

    def remove(self) -> None:
        for name in self._specs:
            run("docker", "rm", "--force", _container(name), check=False)
        run("docker", "network", "rm", NETWORK, check=False)

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        (container,) = spec["containers"]
        user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
        given = {**self._settings, **{entry["name"]: entry["value"] for entry in container["env"]}}
        limits = (
            "--read-only",
            "--cap-drop",
            "ALL",
            "--security-opt",
            "no-new-privileges",
            "--user",
            user,
        )
        place = ("--name", _container(name), "--network", NETWORK, "--network-alias", name)
        run(
            *("docker", "run", "--detach", *limits, *place),
            *(part for key, value in given.items() for part in ("--env", f"{key}={value}")),
            *self._mounts(name, spec["volumes"], container["volumeMounts"]),
            *self._published(container["ports"]),
            container["image"],
        )

    def _mounts(
        self, name: str, volumes: list[dict[str, Any]], mounts: list[dict[str, Any]]
    ) -> list[str]:
        sources = {volume["name"]: volume for volume in volumes}
        flags = []
        for mount in mounts:
            volume, path = sources[mount["name"]], mount["mountPath"]
            if "secret" in volume:
                flags += ["--volume", f"{self._lay(name, volume['secret'])}:{path}:ro"]
            else:
                flags += ["--tmpfs", path]
        return flags

    def _lay(self, name: str, secret: dict[str, Any]) -> Path:
        """The files of a secret, as its volume in this pod has them."""
        entries = self._secrets[secret["secretName"]]
        folder = self._folder / name / secret["secretName"]
        folder.mkdir(parents=True)
        for item in secret.get("items", [{"key": key, "path": key} for key in entries]):
            path = folder / item["path"]
            path.write_bytes(entries[item["key"]])
            shutil.chown(path, 0, GROUP)
            path.chmod(secret["defaultMode"])
        os.chmod(folder, 0o755)
        return folder

    def _published(self, ports: list[dict[str, Any]]) -> list[str]:
        wanted = [port for port in ports if port["name"] in self._ports]
        where = [(self._ports[port["name"]], port["containerPort"]) for port in wanted]
        return [part for here, there in where for part in ("--publish", f"127.0.0.1:{here}:{there}")]


def _container(name: str) -> str:
    return f"octavo-test-pod-{name}"
