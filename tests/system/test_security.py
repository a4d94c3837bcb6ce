"""Who is let in: keys between the planes, keys and certificates of clients, and what is refused."""

import json
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import certificate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from parts import Parts
from service import Service, get, octavo, wait_for
from shared_files import golden

from octavo.common.curve import PAIRS, KeysError, client_keys, server_keys, write_keys
from octavo.common.options import OptionError
from octavo.frontend.access import read_access
from octavo.frontend.client import Client
from octavo.frontend.options import GatewayOptions
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system


# -- key files --------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_keys_are_made_once_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    assert write_keys(folder) == list(PAIRS)
    first = contents(folder)
    assert set(first) == {f"{name}.{end}" for name in PAIRS for end in ("public", "secret")}
    for name in PAIRS:
        assert stat.S_IMODE((folder / f"{name}.secret").stat().st_mode) == 0o600
    with pytest.raises(KeysError, match="--force"):
        write_keys(folder)
    assert write_keys(folder, if_missing=True) == []
    assert contents(folder) == first
    (folder / "worker.public").unlink()
    assert write_keys(folder, if_missing=True) == ["worker"]
    assert contents(folder)["gateway.secret"] == first["gateway.secret"]
    write_keys(folder, force=True)
    assert not set(first.values()) & set(contents(folder).values())


def test_key_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"worker.secret cannot be read.*octavo keygen"):
        client_keys(str(tmp_path), "worker")
    write_keys(tmp_path)
    (tmp_path / "worker.public").write_text("not a key")
    with pytest.raises(OptionError, match=r"worker.public is not a key of 40"):
        server_keys(str(tmp_path))


def test_the_keygen_command(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    log = tmp_path / "log"
    for _ in range(2):
        done = subprocess.run(command("keygen", folder, "--if-missing"), timeout=30)
        assert done.returncode == 0
    again = subprocess.run(command("keygen", folder), capture_output=True, text=True, timeout=30)
    assert again.returncode == 1
    assert "has keys already" in again.stderr and again.stderr.count("\n") == 1
    assert not log.exists()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "octavo.frontend.cli", *map(str, arguments)]


# -- CURVE between the planes ------------------------------------------------------------------------


class Planes(Parts):
    """Processes that are started one by one, with keys of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("ours", "theirs"):
            write_keys(folder / name)
        # The right key of the control plane with another key of one's own.
        write_keys(folder / "mixed")
        public = (folder / "ours" / "controlplane.public").read_bytes()
        (folder / "mixed" / "controlplane.public").write_bytes(public)

    def launch(self, name: str, keys: str | None, **options: object) -> None:
        folder = {} if keys is None else {"curve_keys": self.folder / keys}
        self.options[name] = {**folder, **options}
        self.start(name)

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait_for_log(self, name: str, text: str) -> None:
        wait_for(lambda: text in self.log(name), f"the {name} says {text!r}", 60)

    def refused(self) -> dict[str, float]:
        return {k: v for k, v in self.metrics().items() if k.startswith("octavo_peers_refused_total")}


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[Planes]:
    planes = Planes(tmp_path)
    try:
        yield planes
    finally:
        planes.stop()


@pytest.mark.parametrize(
    ("ours", "gateways", "gateway_says", "control_plane_says"),
    [
        pytest.param(
            "ours",
            None,
            "wants CURVE keys: start this gateway with --curve-keys",
            "no CURVE key",
            id="no",
        ),
        pytest.param(
            "ours",
            "theirs",
            "its key is not the one in",
            "its controlplane.public is not",
            id="foreign",
        ),
        pytest.param("ours", "mixed", "refuses this gateway's key", "its key is not", id="unknown"),
        pytest.param(None, "ours", "has no CURVE keys", "it wants CURVE", id="none-there"),
    ],
)
def test_a_gateway_with_the_wrong_keys_is_told_and_joins_once_they_fit(
    planes: Planes, ours: str | None, gateways: str | None, gateway_says: str, control_plane_says: str
) -> None:
    planes.launch("controlplane", ours)
    planes.launch("gateway", gateways)
    planes.wait_for_log("gateway", gateway_says)
    planes.wait_for_log("controlplane", control_plane_says)
    assert "joined control plane" not in planes.log("gateway")
    reason = "key" if gateways == "mixed" else "handshake"
    assert planes.refused()[f'octavo_peers_refused_total{{reason="{reason}",socket="gateway"}}'] >= 1
    planes.kill("controlplane")
    if gateways == "mixed":  # the control plane learns the key instead
        for end in ("public", "secret"):
            source = planes.folder / "mixed" / f"gateway.{end}"
            (planes.folder / "ours" / f"gateway.{end}").write_bytes(source.read_bytes())
    planes.launch("controlplane", "ours" if gateways == "mixed" else gateways)
    planes.wait_for_log("gateway", "joined control plane")


def test_the_key_of_another_kind_of_process_is_refused(planes: Planes) -> None:
    """A gateway's key opens no worker's port: whoever holds it cannot pose as a worker."""
    planes.launch("controlplane", "ours")
    gateway_key = (planes.folder / "ours" / "gateway.secret").read_bytes()
    (planes.folder / "mixed" / "worker.secret").write_bytes(gateway_key)
    planes.launch("worker", "mixed")
    planes.wait_for_log("worker", "refuses this worker's key")
    assert planes.refused()['octavo_peers_refused_total{reason="key",socket="worker"}'] >= 1
    assert "registered" not in planes.log("controlplane")
    # With the right key at the other end the same worker joins, on both of its connections.
    planes.kill("controlplane")
    public = (planes.folder / "ours" / "gateway.public").read_bytes()
    (planes.folder / "ours" / "worker.public").write_bytes(public)
    planes.launch("controlplane", "ours")
    planes.wait_for_log("controlplane", "gang 0 is ready")


def test_keys_that_are_not_there_end_the_process(planes: Planes) -> None:
    for name in ("controlplane", "worker", "gateway"):
        planes.launch(name, "nowhere")
        assert planes.processes[name].wait(60) == 1
        assert "octavo keygen" in planes.log(name)
        assert "Traceback" not in planes.log(name)


# -- what other machines can reach -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "remedies"),
    [
        ("controlplane", {"controlplane_bind": "0.0.0.0"}, ("--controlplane-bind", "--curve-keys")),
        ("worker", {"worker_probe_host": "0.0.0.0"}, ("--worker-probe-host", "--curve-keys")),
        ("gateway", {"grpc_host": "0.0.0.0"}, ("--grpc-host", "--api-key-file")),
        ("gateway", {"http_host": "::"}, ("--http-host", "OCTAVO_API_KEYS")),
        ("serve", {"http_host": "0.0.0.0"}, ("--http-host", "--api-key-file")),
    ],
)
def test_other_machines_are_not_let_in_by_accident(
    name: str, options: dict[str, object], remedies: tuple[str, ...], tmp_path: Path
) -> None:
    process = octavo(name, options, tmp_path / "log")
    assert process.wait(60) in (1, 2)
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert all(remedy in text for remedy in (*remedies, "--insecure"))


def test_an_exposed_gateway_with_keys_is_warned_to_use_tls(planes: Planes) -> None:
    planes.launch("gateway", None, http_host="0.0.0.0", api_key_file=key_file(planes.folder))
    planes.wait_for_log("gateway", "without TLS")


def test_insecure_is_taken_at_its_word(planes: Planes) -> None:
    planes.launch("controlplane", None, controlplane_bind="0.0.0.0", insecure=True)
    planes.wait_for_log("controlplane", "listening on 0.0.0.0")


# -- API keys ----------------------------------------------------------------------------------------

KEY, OTHER_KEY = "k-4pq8vZ3", "k-second"


def key_file(folder: Path) -> Path:
    path = folder / "api-keys"
    path.write_text(f"# of the tests\n{KEY}\n\n{OTHER_KEY}  # a colleague\n")
    return path


def http(url: str, **headers: str) -> tuple[int, dict[str, Any], Any]:
    """Status, JSON body and headers of a GET."""
    asked = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=20) as reply:
            return reply.status, json.load(reply), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def test_calls_without_a_valid_key_are_refused(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEYS", "from-environment, and-another")
    planes.launch("gateway", None, api_key_file=key_file(planes.folder))
    base = f"http://127.0.0.1:{planes.ports['http_port']}"
    wait_for(lambda: get(f"{base}/health")[0] == 200, "the gateway is alive", 60)
    for wrong in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Basic {KEY}"}):
        status, body, headers = http(f"{base}/v1/models", **wrong)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (body["error"]["code"], body["error"]["type"]) == (
            "invalid_api_key",
            "authentication_error",
        )
    assert get(f"{base}/metrics")[0] == 401
    assert get(f"{base}/ready")[0] == 503  # open, and without a control plane not ready
    for right in (KEY, OTHER_KEY, "from-environment", "and-another"):
        assert http(f"{base}/v1/models", Authorization=f"Bearer {right}")[0] == 200
    assert "a call over http from 127.0.0.1 was refused" in planes.log("gateway")
    assert KEY not in planes.log("gateway")
    with grpc.insecure_channel(f"127.0.0.1:{planes.ports['grpc_port']}") as channel:
        check_grpc_keys(channel)
    assert "a call over grpc from ipv4:127.0.0.1" in planes.log("gateway")
    metrics = urllib.request.Request(f"{base}/metrics", headers={"x-api-key": KEY})
    with urllib.request.urlopen(metrics, timeout=20) as reply:
        figures = reply.read().decode()
    assert 'octavo_unauthenticated_calls_total{api="http"} 4.0' in figures
    assert 'octavo_unauthenticated_calls_total{api="grpc"} 6.0' in figures


def check_grpc_keys(channel: grpc.Channel) -> None:
    stub = pb_grpc.GenerationStub(channel)
    wrong = ((), (("authorization", "Bearer wrong"),), (("x-api-key", ""),))
    for metadata in wrong:
        for call in (stub.GetModelInfo, stub.Generate):
            with pytest.raises(grpc.RpcError) as caught:
                answer = call(pb.GetModelInfoRequest(), metadata=metadata, timeout=20)
                list(answer)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for metadata in ((("authorization", f"Bearer {KEY}"),), (("x-api-key", OTHER_KEY),)):
        reply = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=20)
        assert reply.vocab_size > 0
    health = health_pb2_grpc.HealthStub(channel)
    status = health.Check(health_pb2.HealthCheckRequest(), timeout=20).status
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("text", ["", "# nothing\n", "two words\n", "unprintable\x07\n"])
def test_bad_key_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(OptionError, match="api-key-file"):
        read_access(GatewayOptions(api_key_file=str(tmp_path / "keys")))


# -- TLS ---------------------------------------------------------------------------------------------


def test_certificate_options_that_do_not_fit(tmp_path: Path) -> None:
    files = {name: str(path) for name, path in certificate(tmp_path).items()}
    with pytest.raises(OptionError, match="both or neither"):
        GatewayOptions(tls_cert=files["tls_cert"])
    with pytest.raises(OptionError, match="not a certificate and its key"):
        read_access(GatewayOptions(tls_cert=files["tls_key"], tls_key=files["tls_cert"]))
    with pytest.raises(OptionError, match="cannot be read"):
        read_access(GatewayOptions(tls_cert=files["tls_cert"], tls_key=str(tmp_path / "none")))


def test_a_whole_service_with_every_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CURVE, TLS and API keys together: who has them all gets the answer, who lacks one does not."""
    line = golden("greedy")[0]
    write_keys(tmp_path / "keys")
    tls = certificate(tmp_path)
    options = {**tls, "curve_keys": tmp_path / "keys", "api_key_file": key_file(tmp_path)}
    with Service(tmp_path / "log", options) as service:
        with Client(service.target, KEY, Path(str(tls["tls_cert"]))) as client:
            length = len(line["output_token_ids"])
            deltas = client.generate(line["prompt_token_ids"], temperature=0.0, max_tokens=length)
            assert [t for delta in deltas for t in delta.token_ids] == line["output_token_ids"]
        trust = ssl.create_default_context(cafile=str(tls["tls_cert"]))
        bearer = urllib.request.Request(
            f"https://127.0.0.1:{service.http_port}/v1/models",
            headers={"Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(bearer, timeout=20, context=trust) as reply:
            assert reply.status == 200
        monkeypatch.setenv("OCTAVO_API_KEY", KEY)
        status = subprocess.run(
            command("status", f"--grpc-port={service.grpc_port}", f"--tls-ca={tls['tls_cert']}"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert status.returncode == 0 and "ready" in status.stdout
        check_plaintext_is_refused(service)


def check_plaintext_is_refused(service: Service) -> None:
    status, text = get(f"{service.http}/ready")
    assert status == 0, text
    with grpc.insecure_channel(service.target) as channel, pytest.raises(grpc.RpcError) as caught:
        pb_grpc.GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    said = "a client on the HTTP port was refused in the TLS handshake: it speaks HTTP without TLS"
    wait_for(lambda: said in service.log.read_text(), "the log tells of HTTP", 10)
    wait_for(lambda: "WRONG_VERSION_NUMBER" in service.log.read_text(), "the log tells of gRPC", 10)
