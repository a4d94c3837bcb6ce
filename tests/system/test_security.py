"""Who is let in: keys between the planes, keys and certificates of clients, and what is refused."""

import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from asking import request, stream
from service import PORTS, Service, free_ports, octavo, read_metrics, wait_for
from shared_files import golden

from octavo.common.curve import PAIRS, KeysError, client_keys, server_keys, write_keys
from octavo.common.options import OptionError
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
    import sys

    return [sys.executable, "-m", "octavo.frontend.cli", *map(str, arguments)]


# -- CURVE between the planes ------------------------------------------------------------------------


class Planes:
    """Processes that are started one by one, with keys of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, object] = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("ours", "theirs"):
            write_keys(folder / name)
        # The right key of the control plane with another key of one's own.
        write_keys(folder / "mixed")
        public = (folder / "ours" / "controlplane.public").read_bytes()
        (folder / "mixed" / "controlplane.public").write_bytes(public)

    def start(self, name: str, keys: str | None, **options: object) -> None:
        names = {
            "controlplane": ("gateway_port", "worker_port", "controlplane_probe_port"),
            "worker": ("worker_port", "worker_probe_port"),
            "gateway": ("gateway_port", "grpc_port", "http_port"),
        }
        chosen = {port: self.ports[port] for port in names[name]} | options
        if keys is not None:
            chosen["curve_keys"] = self.folder / keys
        self.running[name] = octavo(name, chosen, self.folder / f"{name}.log")

    def stop(self, name: str) -> None:
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for_log(self, name: str, text: str) -> None:
        wait_for(lambda: text in self.log(name), f"the {name} says {text!r}", 60)

    def refused(self) -> dict[str, float]:
        metrics = read_metrics(int(str(self.ports["controlplane_probe_port"])))
        return {k: v for k, v in metrics.items() if k.startswith("octavo_peers_refused_total")}


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[Planes]:
    planes = Planes(tmp_path)
    with ExitStack() as stack:
        stack.callback(lambda: [planes.stop(name) for name in list(planes.running)])
        yield planes


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
    planes.start("controlplane", ours)
    planes.start("gateway", gateways)
    planes.wait_for_log("gateway", gateway_says)
    planes.wait_for_log("controlplane", control_plane_says)
    assert "joined control plane" not in planes.log("gateway")
    reason = "key" if gateways == "mixed" else "handshake"
    assert planes.refused()[f'octavo_peers_refused_total{{reason="{reason}",socket="gateway"}}'] >= 1
    planes.stop("controlplane")
    if gateways == "mixed":  # the control plane learns the key instead
        for end in ("public", "secret"):
            source = planes.folder / "mixed" / f"gateway.{end}"
            (planes.folder / "ours" / f"gateway.{end}").write_bytes(source.read_bytes())
    planes.start("controlplane", "ours" if gateways == "mixed" else gateways)
    planes.wait_for_log("gateway", "joined control plane")


def test_the_key_of_another_kind_of_process_is_refused(planes: Planes) -> None:
    """A gateway's key opens no worker's port: whoever holds it cannot pose as a worker."""
    planes.start("controlplane", "ours")
    gateway_key = (planes.folder / "ours" / "gateway.secret").read_bytes()
    (planes.folder / "mixed" / "worker.secret").write_bytes(gateway_key)
    planes.start("worker", "mixed")
    planes.wait_for_log("worker", "refuses this worker's key")
    assert planes.refused()['octavo_peers_refused_total{reason="key",socket="worker"}'] >= 1
    assert "registered" not in planes.log("controlplane")
    # With the right key at the other end the same worker joins, on both of its connections.
    planes.stop("controlplane")
    public = (planes.folder / "ours" / "gateway.public").read_bytes()
    (planes.folder / "ours" / "worker.public").write_bytes(public)
    planes.start("controlplane", "ours")
    planes.wait_for_log("controlplane", "gang 0 is ready")


def test_keys_that_are_not_there_end_the_process(planes: Planes) -> None:
    for name in ("controlplane", "worker", "gateway"):
        planes.start(name, "nowhere")
        assert planes.running[name].wait(60) == 1
        assert "octavo keygen" in planes.log(name)
        assert "Traceback" not in planes.log(name)


def test_a_whole_service_with_keys(tmp_path: Path) -> None:
    line = golden("greedy")[0]
    write_keys(tmp_path / "keys")
    with Service(tmp_path / "log", {"curve_keys": tmp_path / "keys"}) as service:
        with grpc.insecure_channel(service.target) as channel:
            assert greedy(pb_grpc.GenerationStub(channel), line) == line["output_token_ids"]
        service.wait_until_idle()


def greedy(stub: Any, line: dict[str, Any]) -> list[int]:
    asked = request(line["prompt_token_ids"], temperature=0.0, max_tokens=len(line["output_token_ids"]))
    return stream(stub, asked).samples[0].token_ids
