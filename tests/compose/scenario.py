"""`docker compose up`, and then: scale, kill, stop. Every stream is that of a quiet day.

The tests run in their order, on one service. What a stream must be is computed before, by processes
on this machine that nobody disturbs.
"""

import ssl
import stat
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificate
from containers import Containers, run
from load import Load
from parts import Parts
from pods import Pods
from ports import free_ports
from service import wait_for
from undisturbed import MARGIN, Case, least_margins, run_undisturbed

from octavo.common.curve import write_keys
from octavo.frontend.client import Client, ClientError

SERVICES = ("controlplane", "worker", "gateway")
TOKENS = 150  # that the streams get, together, before the next thing happens to them


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    with Parts(tmp_path_factory.mktemp("quiet")) as parts:
        cases = run_undisturbed(parts.targets()[0])
    assert min(least_margins(cases)) >= MARGIN
    return cases


@pytest.fixture(scope="module")
def service(cases: list[Case]) -> Iterator[Containers]:
    service = Containers(*free_ports(2))
    service.compose("down", "--volumes")  # what an earlier run has left
    service.up()
    service.wait_until_ready()
    yield service
    service.save_logs("service")
    service.compose("down", "--volumes")


def test_a_stream_is_that_of_a_quiet_day(service: Containers, cases: list[Case]) -> None:
    for case in (cases[0], cases[-1]):
        with Client(service.target) as client:
            deltas = list(client.generate(case.prompt, **case.sampling))
        assert tuple(token for delta in deltas for token in delta.token_ids) == case.tokens
        assert deltas[-1].finish_reason


@pytest.mark.parametrize("name", SERVICES)
def test_containers_may_do_little(service: Containers, name: str) -> None:
    (container,) = service.ids(name)
    found = service.inspect(container)
    assert found["Config"]["User"] == "10001:10001"
    assert found["HostConfig"]["ReadonlyRootfs"]
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"]
    status = service.execute(container, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    mounts = [line.split() for line in service.execute(container, "cat", "/proc/mounts").splitlines()]
    (root,) = (options for _, place, _, options, *_ in mounts if place == "/")
    assert "ro" in root.split(",")
    arguments = service.execute(container, "cat", "/proc/1/cmdline").split("\0")
    assert arguments[-2:] == [name, ""], "no shell stands before the process"


def test_only_this_machine_reaches_the_service(service: Containers) -> None:
    for name in SERVICES:
        (container,) = service.ids(name)
        published = service.inspect(container)["HostConfig"]["PortBindings"] or {}
        assert bool(published) == (name == "gateway")
        assert {entry["HostIp"] for entries in published.values() for entry in entries} <= {"127.0.0.1"}


def keys(service: Containers) -> dict[str, bytes]:
    """The key files of the volume by name; nobody but their owner may read a secret, or list them."""
    (volume,) = (
        mount["Source"]
        for mount in service.inspect(service.ids("controlplane")[0])["Mounts"]
        if mount["Destination"] == "/keys"
    )
    folder = Path(volume)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == 10001
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_keys_are_made_once_and_for_nobody_else(service: Containers) -> None:
    first = keys(service)
    assert sorted(first) == sorted(f"{n}.{end}" for n in SERVICES for end in ("public", "secret"))
    service.compose("run", "--rm", "keygen")
    assert keys(service) == first
    (container,) = service.ids("gateway")
    assert not service.inspect(container)["Mounts"][0]["RW"]


def test_the_control_plane_has_no_torch(service: Containers) -> None:
    (container,) = service.ids("controlplane")
    script = "import importlib.util as u; print([u.find_spec(m) for m in ('torch', 'transformers')])"
    assert service.execute(container, "python", "-c", script) == "[None, None]"


def test_workers_come_and_go_under_load(service: Containers, cases: list[Case]) -> None:
    with Load(service.target, cases) as load:
        service.up(workers=3)
        service.wait_until_ready(workers=3)
        load.wait_for_tokens(TOKENS)
        with Client(service.target) as client:
            gangs = client.server_info().gangs
        assert len(gangs) == 3 and all(gang.plans for gang in gangs)
        start = time.time()
        service.up(workers=1)
        assert service.exit_codes("worker", start) == [0, 0]
        wait_for(lambda: len(service.ids("worker")) == 1, "two workers are gone", 60)
        load.wait_for_tokens(TOKENS)
    print(f"{load.streams} streams while workers came and went")


@pytest.mark.parametrize("name", ["worker", "controlplane"])
def test_a_killed_process_is_brought_back(service: Containers, cases: list[Case], name: str) -> None:
    (container,) = service.ids(name)
    before = service.restarts(container)
    with Load(service.target, cases) as load:
        service.kill_host_process(container)
        wait_for(lambda: service.restarts(container) > before, "it has been started again", 60)
        service.wait_until_ready()
        load.wait_for_tokens(TOKENS)
    print(f"{load.streams} streams around the death of the {name}")


@pytest.mark.parametrize("name", ["worker", "controlplane"])
def test_a_killed_container_is_started_again(service: Containers, cases: list[Case], name: str) -> None:
    (container,) = service.ids(name)
    with Load(service.target, cases) as load:
        run("docker", "kill", container)
        wait_for(lambda: not service.is_ready(), "the gateway tells of it", 60)
        run("docker", "start", container)
        service.wait_until_ready()
        load.wait_for_tokens(TOKENS)
    print(f"{load.streams} streams around the kill of the {name}'s container")


def test_no_block_and_no_request_is_left(service: Containers) -> None:
    with Client(service.target) as client:

        def is_idle() -> bool:
            info = client.server_info()
            used = sum(gang.device_pool.used_blocks + gang.swap_pool.used_blocks for gang in info.gangs)
            return info.waiting + info.preempted + info.running + used == 0

        wait_for(is_idle, "everything is given back", 30)


def test_all_stop_in_order(service: Containers) -> None:
    containers = [container for name in ("keygen", *SERVICES) for container in service.ids(name)]
    service.compose("stop")
    states = {
        service.inspect(container)["Name"]: service.inspect(container)["State"]
        for container in containers
    }
    assert {name: state["ExitCode"] for name, state in states.items()} == dict.fromkeys(states, 0)
    service.save_logs("service")
    service.compose("down")
    assert not any(service.ids(name) for name in ("keygen", *SERVICES))


def test_a_gang_of_three_containers(cases: list[Case]) -> None:
    """Tensor parallelism by environment; a rank that dies takes its seat again."""
    service = Containers(*free_ports(2), tensor_parallel=3)
    service.up(workers=3)
    try:
        service.wait_until_ready(workers=3)
        with Load(service.target, cases) as load:
            victim = service.ids("worker")[1]
            service.kill_host_process(victim)
            wait_for(lambda: service.restarts(victim) > 0, "it has been started again", 60)
            service.wait_until_ready(workers=3)
            load.wait_for_tokens(TOKENS)
        with Client(service.target) as client:
            (gang,) = client.server_info().gangs
        assert gang.size == 3
    finally:
        service.save_logs("gang")
        service.compose("down", "--volumes")


def test_the_pods_of_the_manifests_serve(tmp_path: Path, cases: list[Case]) -> None:
    """With the secrets that the manifests name: TLS, an API key, and of the CURVE keys their share."""
    write_keys(tmp_path / "keys")
    tls = {name: Path(str(path)).read_bytes() for name, path in certificate(tmp_path).items()}
    secrets = {
        "octavo-keys": {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()},
        "octavo-api-keys": {"api-keys": b"key-of-a-client\n"},
        "octavo-tls": {"tls.crt": tls["tls_cert"], "tls.key": tls["tls_key"]},
    }
    trusted, (grpc, http) = tmp_path / "cert.pem", free_ports(2)
    with Pods(tmp_path, secrets, {"grpc": grpc, "http": http}) as pods:
        wait_for(lambda: is_ready(http, trusted), "the gateway is ready", 180)
        target, case = f"127.0.0.1:{grpc}", cases[0]
        with Client(target, "key-of-a-client", trusted) as client:
            deltas = list(client.generate(case.prompt, **case.sampling))
        assert tuple(token for delta in deltas for token in delta.token_ids) == case.tokens
        with Client(target, "another", trusted) as client, pytest.raises(ClientError) as refused:
            client.model_info()
        assert refused.value.code == "UNAUTHENTICATED"
        assert set(pods.stop().values()) == {0}


def is_ready(port: int, trusted: Path) -> bool:
    try:
        url = f"https://127.0.0.1:{port}/ready"
        context = ssl.create_default_context(cafile=str(trusted))
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return int(answer.status) == 200
    except OSError:  # refused, or 503
        return False
