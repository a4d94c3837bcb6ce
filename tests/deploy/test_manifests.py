"""The manifests: Kubernetes' own schemas, and the names and ports that Octavo's processes have."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from octavo.common.options import add_options, environment_name
from octavo.controlplane.options import ControlPlaneOptions
from octavo.dataplane.options import WorkerOptions
from octavo.frontend.access import KEYS_VARIABLE
from octavo.frontend.options import GatewayOptions

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OBJECTS = [value for path in MANIFESTS for value in yaml.safe_load_all(path.read_text())]
VERSIONS = ("1.34", "1.37")
OPTIONS: dict[str, type[Any]] = {
    "controlplane": ControlPlaneOptions,
    "worker": WorkerOptions,
    "gateway": GatewayOptions,
}


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {value["metadata"]["name"]: value for value in OBJECTS if value["kind"] == kind}


DEPLOYMENTS = named("Deployment")
PODS = {
    name.removeprefix("octavo-"): value["spec"]["template"]["spec"]
    for name, value in DEPLOYMENTS.items()
}


def title(value: dict[str, Any]) -> str:
    return f"{value['kind']}-{value['metadata']['name']}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value", OBJECTS, ids=title)
def test_every_object_is_what_kubernetes_takes(value: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(value, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    value = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(value, VERSIONS[0], strict=True)


def test_there_is_one_of_each_kind_of_process() -> None:
    assert set(PODS) == set(OPTIONS)
    assert set(named("HorizontalPodAutoscaler")) == {"octavo-worker"}
    assert set(named("PodDisruptionBudget")) == {"octavo-worker", "octavo-gateway"}


# -- the environment --------------------------------------------------------------------------------


def environments() -> Iterator[Any]:
    """Of each container of the manifests and the compose files: its process, and its variables."""
    settings = named("ConfigMap")["octavo"]["data"]
    for name, pod in PODS.items():
        (container,) = pod["containers"]
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        yield pytest.param(name, given, id=f"kubernetes-{name}")
    yield pytest.param(None, settings, id="kubernetes-settings")
    for file in ("compose.yaml", "compose.gpu.yaml"):
        for name, service in yaml.safe_load((ROOT / file).read_text())["services"].items():
            given = {name: _default(value) for name, value in service.get("environment", {}).items()}
            if given:
                yield pytest.param(name, given, id=f"{file}-{name}")


def _default(value: str) -> str:
    """``x`` of ``${NAME:-x}``."""
    return value.partition(":-")[2].removesuffix("}") if value.startswith("${") else value


@pytest.mark.parametrize(("name", "given"), list(environments()))
def test_every_variable_is_an_option_and_its_value_is_taken(
    name: str | None, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = list(OPTIONS.values()) if name is None else [OPTIONS[name]]
    known = {environment_name(field) for kind in kinds for field in kind.__dataclass_fields__}
    ours = {key: value for key, value in given.items() if key.startswith("OCTAVO_")}
    assert set(ours) - {KEYS_VARIABLE} <= known
    for key, value in ours.items():
        monkeypatch.setenv(key, value)
    for kind in kinds:
        parser = argparse.ArgumentParser()
        add_options(parser, kind)
        kind(**vars(parser.parse_args([])))


def test_in_a_cluster_no_process_lets_strangers_in() -> None:
    for pod in PODS.values():
        (container,) = pod["containers"]
        given = {entry["name"] for entry in container["env"]}
        assert "OCTAVO_CURVE_KEYS" in given
        assert "OCTAVO_INSECURE" not in given


# -- pods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_pods_may_do_little(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_the_cluster_does_not_set_options(name: str) -> None:
    """A service named octavo-gateway would bring the variable OCTAVO_GATEWAY_PORT: an option."""
    assert PODS[name]["enableServiceLinks"] is False


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pod_has_the_keys_that_its_process_needs_and_no_more(name: str) -> None:
    (keys,) = (volume["secret"] for volume in PODS[name]["volumes"] if volume["name"] == "keys")
    others = ["worker", "gateway"] if name == "controlplane" else ["controlplane"]
    assert [item["key"] for item in keys["items"]] == [
        f"{name}.secret",
        *(f"{other}.public" for other in others),
    ]


def test_ports_are_those_that_the_processes_have() -> None:
    def ports(name: str) -> dict[str, int]:
        (container,) = PODS[name]["containers"]
        return {port["name"]: port["containerPort"] for port in container["ports"]}

    control, worker, gateway = ControlPlaneOptions(), WorkerOptions(), GatewayOptions()
    assert ports("controlplane") == {
        "gateways": control.gateway_port,
        "workers": control.worker_port,
        "probes": control.controlplane_probe_port,
    }
    assert ports("worker") == {"probes": worker.worker_probe_port}
    assert ports("gateway") == {"grpc": gateway.grpc_port, "http": gateway.http_port}
    for name, service in named("Service").items():
        served = {port["targetPort"]: port["port"] for port in service["spec"]["ports"]}
        assert served == ports(name.removeprefix("octavo-"))


def test_selectors_find_their_pods() -> None:
    for name, deployment in DEPLOYMENTS.items():
        label = {"app.kubernetes.io/name": name}
        assert deployment["spec"]["selector"]["matchLabels"] == label
        assert label.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    for name, service in named("Service").items():
        assert service["spec"]["selector"] == {"app.kubernetes.io/name": name}
    for name, budget in named("PodDisruptionBudget").items():
        assert budget["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
