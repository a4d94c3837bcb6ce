"""Processes start, say what is wrong when they cannot, and leave nothing behind."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service import PORTS, Service, free_ports, get, octavo, wait_for

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system


@pytest.fixture
def ports() -> dict[str, object]:
    return dict(zip(PORTS, free_ports(len(PORTS)), strict=True))


def pick(ports: dict[str, object], *names: str) -> dict[str, object]:
    return {name: ports[name] for name in names}


def controlplane_ports(ports: dict[str, object]) -> dict[str, object]:
    return pick(ports, "gateway_port", "worker_port", "controlplane_probe_port")


def gateway_ports(ports: dict[str, object]) -> dict[str, object]:
    return pick(ports, "gateway_port", "grpc_port", "http_port")


@contextmanager
def running(command: str, options: dict[str, object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = octavo(command, options, log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


def fails(command: str, options: dict[str, object], log: Path) -> str:
    """Runs a command that must fail, and returns what it said."""
    with running(command, options, log) as process:
        status = process.wait(60)
        text = log.read_text()
        assert status in (1, 2), text
        assert "Traceback" not in text
        return text


# -- the control plane is small ---------------------------------------------------------------------


def test_the_control_plane_loads_no_model_library(tmp_path: Path, ports: dict[str, object]) -> None:
    code = (
        "import sys, octavo.frontend.cli as cli, octavo.controlplane.process as process\n"
        "process.main = lambda options: print(sorted(m.split('.')[0] for m in sys.modules)) or 0\n"
        "cli.main(['controlplane'])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"'(\w+)'", output.stdout))
    assert "zmq" in loaded
    assert not loaded & {"torch", "transformers", "grpc", "tokenizers", "fastapi"}


def test_the_control_plane_fits_in_100_mb(tmp_path: Path, ports: dict[str, object]) -> None:
    with running("controlplane", controlplane_ports(ports), tmp_path / "log") as process:
        probe = f"http://127.0.0.1:{ports['controlplane_probe_port']}"
        wait_for(lambda: get(f"{probe}/health")[0] == 200, "the control plane is alive", 30)
        assert psutil.Process(process.pid).memory_info().rss < 100e6
        assert get(f"{probe}/ready")[0] == 503


# -- bad starts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["worker", "gateway", "serve"])
def test_no_model_at_the_path(command: str, tmp_path: Path, ports: dict[str, object]) -> None:
    named = {"worker": ("worker_port", "worker_probe_port"), "gateway": ("grpc_port", "http_port")}
    options = pick(ports, *named.get(command, PORTS))
    text = fails(command, {**options, "model": tmp_path / "nothing"}, tmp_path / "log")
    assert f"there is no model at {tmp_path / 'nothing'}" in text
    assert "--model takes" in text


def test_a_folder_that_is_no_model(tmp_path: Path, ports: dict[str, object]) -> None:
    options = pick(ports, "worker_port", "worker_probe_port")
    assert "no config.json" in fails("worker", {**options, "model": tmp_path}, tmp_path / "log")


def test_a_file_that_is_no_gguf(tmp_path: Path, ports: dict[str, object]) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"not a model at all")
    options = pick(ports, "worker_port", "worker_probe_port")
    assert "not a readable GGUF file" in fails("worker", {**options, "model": model}, tmp_path / "log")


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("controlplane", "gateway_port"),
        ("controlplane", "worker_port"),
        ("controlplane", "controlplane_probe_port"),
        ("worker", "worker_probe_port"),
        ("gateway", "grpc_port"),
        ("gateway", "http_port"),
    ],
)
def test_a_port_is_taken(command: str, port: str, tmp_path: Path, ports: dict[str, object]) -> None:
    groups = {
        "controlplane": controlplane_ports(ports),
        "worker": pick(ports, "worker_port", "worker_probe_port"),
        "gateway": gateway_ports(ports),
    }
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        text = fails(command, {**groups[command], port: taken}, tmp_path / "log")
    assert str(taken) in text
    assert "--" + port.replace("_", "-") in text


def test_a_wrong_option(tmp_path: Path) -> None:
    assert "--blocksize" in fails("controlplane", {"blocksize": 8}, tmp_path / "a")
    assert "above the maximum of 256" in fails("controlplane", {"block_size": 1000}, tmp_path / "b")
    text = fails("controlplane", {"max_num_seqs": 600}, tmp_path / "c")
    assert "--max-num-batched-tokens 512 is below --max-num-seqs 600" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_blocks": 4, "block_size": 16, "max_model_len": 100}, "it holds 64 tokens"),
        ({"kv_memory": "1k"}, "it has no block"),
        ({"max_model_len": 100_000}, "exceeds the 8192 positions"),
    ],
)
def test_a_pool_too_small_for_one_sequence(
    options: dict[str, object], message: str, tmp_path: Path, ports: dict[str, object]
) -> None:
    text = fails("serve", {**ports, **options}, tmp_path / "log")
    assert message in text
    assert "the worker exited with status 1" in text


def test_an_engine_refuses_a_block_size_that_it_cannot_take(
    tmp_path: Path, ports: dict[str, object]
) -> None:
    text = fails("serve", {**ports, "engine": "openvino", "block_size": 16}, tmp_path / "log")
    assert "--engine openvino: it takes blocks of 32 tokens, and --block-size is 16" in text
    assert "the worker exited with status 1" in text


@pytest.mark.parametrize(
    "remedy",
    [
        pytest.param({"engine": "auto", "block_size": 16}, id="same-block-size"),
        pytest.param({"engine": "torch"}, id="torch", marks=pytest.mark.full),
    ],
)
def test_a_worker_that_cannot_take_its_gang_s_block_size_is_told_what_to_do(
    remedy: dict[str, object], tmp_path: Path, ports: dict[str, object]
) -> None:
    options = pick(ports, "worker_port", "worker_probe_port")
    log = tmp_path / "controlplane"
    with running("controlplane", {**controlplane_ports(ports), "block_size": 16}, log):
        text = fails("worker", {**options, "engine": "openvino"}, tmp_path / "refused")
        assert "--block-size 16 is not supported by the openvino engine on cpu, which takes 32" in text
        assert "start the worker with --block-size 16 too, or with --engine torch" in text
        with running("worker", {**options, **remedy}, tmp_path / "worker"):
            probe = f"http://127.0.0.1:{ports['worker_probe_port']}"
            wait_for(lambda: get(f"{probe}/ready")[0] == 200, "the worker serves", 60)
        assert "torch engine on cpu" in log.read_text()


def test_a_worker_without_control_plane_waits_and_says_so(
    tmp_path: Path, ports: dict[str, object]
) -> None:
    log = tmp_path / "log"
    with running("worker", pick(ports, "worker_port", "worker_probe_port"), log) as process:
        wait_for(lambda: "waiting for the control plane at" in log.read_text(), "the worker waits")
        probe = f"http://127.0.0.1:{ports['worker_probe_port']}"
        assert get(f"{probe}/health")[0] == 200
        assert get(f"{probe}/ready")[0] == 503
        process.terminate()
        assert process.wait(20) == 0


def test_a_control_plane_without_workers(tmp_path: Path, ports: dict[str, object]) -> None:
    """Health is NOT_SERVING, and a request waits up to its deadline."""
    with (
        running("controlplane", controlplane_ports(ports), tmp_path / "controlplane"),
        running("gateway", gateway_ports(ports), tmp_path / "gateway"),
    ):
        http = f"http://127.0.0.1:{ports['http_port']}"
        wait_for(lambda: get(f"{http}/health")[0] == 200, "the gateway is alive")
        assert get(f"{http}/ready")[0] == 503
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                request = pb.GenerateRequest(text="hello")
                pb_grpc.GenerationStub(channel).GenerateUnary(request, timeout=1.0)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        probe = f"http://127.0.0.1:{ports['controlplane_probe_port']}"
        empty = 'octavo_sequence_groups{state="waiting"} 0.0'
        wait_for(lambda: empty in get(f"{probe}/metrics")[1], "the request is gone", 10)


# -- good starts and ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_stops_everything(number: signal.Signals, tmp_path: Path) -> None:
    with Service(tmp_path / "log") as service:
        assert service.process is not None
        children = psutil.Process(service.process.pid).children(recursive=True)
        names = {child.cmdline()[3] for child in children if "octavo.frontend.cli" in child.cmdline()}
        assert names == {"controlplane", "worker", "gateway"}
        wait_for(lambda: "Octavo is ready" in service.log.read_text(), "it says where to connect", 10)
        service.process.send_signal(number)
        assert service.process.wait(40) == 0
        assert not [child for child in children if child.is_running()]


def test_children_die_with_their_parent(tmp_path: Path) -> None:
    with Service(tmp_path / "log") as service:
        assert service.process is not None
        children = psutil.Process(service.process.pid).children(recursive=True)
        service.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert len(gone) >= 3 and not alive


def test_demo(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    command = [sys.executable, "-m", "octavo.frontend.cli", "demo", "--max-tokens", "24", "Say hello."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10
    assert re.search(r"TTFT [0-9.]+ s, [0-9.]+ tokens/s, 24 tokens", done.stdout)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "octavo.frontend.cli" in (p.info["cmdline"] or [])]
