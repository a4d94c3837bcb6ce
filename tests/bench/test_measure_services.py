import argparse

from measure.services import Ports, add_service_options, serve_command, service_parts, worker_options

PORTS = Ports(gateways=1, workers=2, grpc=3, http=4, controlplane_probe=5, worker_probe=6)


def values(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_service_options(parser)
    return parser.parse_args(arguments)


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_parts_of_a_service_find_one_another() -> None:
    controlplane, worker, gateway = service_parts(values(), PORTS)
    assert [part.name for part in (controlplane, worker, gateway)] == [
        *("controlplane", "worker", "gateway")
    ]
    assert after(list(controlplane.command), "--worker-port") == "2"
    assert after(list(worker.command), "--worker-port") == "2"
    assert after(list(controlplane.command), "--gateway-port") == "1"
    assert after(list(gateway.command), "--gateway-port") == "1"
    assert [(part.port, part.path) for part in (controlplane, worker, gateway)] == [
        *((5, "/health"), (6, "/ready"), (4, "/ready"))
    ]


def test_a_worker_can_be_sent_past_something_else() -> None:
    _, worker, _ = service_parts(values(), PORTS, worker_connects_to=77)
    assert after(list(worker.command), "--worker-port") == "77"


def test_a_whole_service_gets_all_its_ports() -> None:
    command = serve_command(["--dtype", "float32"], PORTS)
    assert command[1:6] == ["-m", "octavo.frontend.cli", "serve", "--dtype", "float32"]
    assert sorted(flag.split("=")[1] for flag in command[6:]) == list("123456")
    assert "--http-port=4" in command and "--worker-probe-port=6" in command


def test_each_part_gets_its_own_options() -> None:
    parsed = values("--engine", "torch", "--max-num-seqs", "7", "--tokenizer-threads", "3")
    controlplane, worker, gateway = (list(part.command) for part in service_parts(parsed, PORTS))
    assert after(controlplane, "--max-num-seqs") == "7" and "--max-num-seqs" not in worker
    assert after(worker, "--engine") == "torch" and "--engine" not in gateway
    assert after(gateway, "--tokenizer-threads") == "3"
    assert worker_options(parsed).engine == "torch"
