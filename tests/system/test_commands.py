"""The client commands against the running service."""

import json
import subprocess
import sys

import pytest
from service import Service, free_ports
from shared_files import golden

pytestmark = pytest.mark.system

RAW = golden("greedy")[1]
CHAT = next(line for line in golden("greedy") if line["kind"] == "chat")


def octavo(
    service: Service, *arguments: str, typed: str = "", port: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.frontend.cli", *arguments]
    command += ["--grpc-port", str(service.grpc_port if port is None else port)]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)


def test_generate_prints_the_text(service: Service) -> None:
    done = octavo(service, "generate", RAW["text"], "--temperature", "0", "--max-tokens", "6")
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == " the primary colours of the human"
    assert "TTFT" in done.stderr and "tokens/s" in done.stderr


def test_generate_prints_one_json_object(service: Service) -> None:
    options = ("--temperature", "0", "--max-tokens", "4", "-n", "2", "--logprobs", "1", "--json")
    answer = json.loads(octavo(service, "generate", RAW["text"], *options).stdout)
    assert answer["token_ids"] == RAW["output_token_ids"][:4]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(RAW["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == 8
    assert len(answer["choices"]) == 2
    assert len(answer["logprobs"]) == 4
    assert 0 < answer["timings"]["ttft"] <= answer["timings"]["total"]


def test_chat_answers_one_message(service: Service) -> None:
    done = octavo(service, "chat", CHAT["prompt"], "--temperature", "0", "--max-tokens", "8")
    assert done.returncode == 0
    assert CHAT["output_text"].startswith(done.stdout.rstrip("\n"))
    assert done.stdout.strip()


def test_chat_keeps_the_history(service: Service) -> None:
    options = ("--temperature", "0", "--max-tokens", "8")
    one = octavo(service, "chat", *options, typed=f"{CHAT['prompt']}\n")
    two = octavo(service, "chat", *options, typed=f"{CHAT['prompt']}\n\nAnd then?\n")
    assert one.returncode == two.returncode == 0
    assert two.stdout.startswith(one.stdout)
    assert len(two.stdout) > len(one.stdout)


def test_status(service: Service) -> None:
    done = octavo(service, "status")
    assert done.returncode == 0
    assert "ready" in done.stdout
    assert "torch on cpu" in done.stdout
    state = json.loads(octavo(service, "status", "--json").stdout)
    pool = state["server"]["gangs"][0]["device_pool"]
    assert pool["free_blocks"] + pool["cached_blocks"] == pool["total_blocks"]


@pytest.mark.parametrize("command", [("generate", "x"), ("chat", "x"), ("status",)])
def test_no_service_is_one_clear_line(service: Service, command: tuple[str, ...]) -> None:
    port = free_ports(1)[0]
    done = octavo(service, *command, port=port)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"no Octavo service answers at 127.0.0.1:{port}" in done.stderr


def test_a_bad_value_is_one_clear_line(service: Service) -> None:
    done = octavo(service, "generate", "x", "--top-p", "7")
    assert done.returncode == 1
    assert done.stderr == "INVALID_ARGUMENT: top_p must be in (0, 1], got 7.0\n"
