"""Broken and hostile input at every socket while a good stream runs: it must not notice.

Memory is judged by the resident set of each process, after a fifth of the input and after all of it.
"""

import functools
import http.client
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
import zmq
from asking import request, stream
from fuzzing import frames, gateway_messages, grpc_call, http_request, worker_messages
from service import Service, get, wait_for
from shared_files import golden

from octavo.common.modelfiles import open_model
from octavo.proto.session import control_identity, data_identity, gateway_identity
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

FRAMES = [2_000, pytest.param(200_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
REQUESTS = [300, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
FRAMES_PER_CONNECTION = 200
PORTION = 4_000  # frames
GROWTH = 10 << 20  # bytes that a process may grow by, or 5 % if that is more
# The worker's scratch memory follows the largest batch that it has had, which some of the input that is
# right after all may make larger than any before.
WORKER_GROWTH = 160 << 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose gateways hold short leases, so that what invented ones asked for is soon gone.

    Its pool is small and used whole before anything is weighed: a pool's memory is the system's until
    it is touched.
    """
    sizes = {"num_kv_blocks": 48, "swap_blocks": 0, "max_model_len": 256}
    options: dict[str, object] = {"lease": 5, **sizes}
    with Service(tmp_path_factory.mktemp("fuzzed") / "log", options) as service:
        with grpc.insecure_channel(service.target) as channel, ThreadPoolExecutor(4) as pool:
            stub = pb_grpc.GenerationStub(channel)
            asked = [request([5 + i] * 250, max_tokens=4, ignore_eos=True) for i in range(12)]
            list(pool.map(lambda one: stream(stub, one), asked))
        yield service
        assert "it is started again" not in service.log.read_text()
        assert service.stop() == 0


class Fleet:
    """The processes of a service and what they weigh."""

    def __init__(self, service: Service) -> None:
        assert service.process is not None
        self.processes = psutil.Process(service.process.pid).children()
        assert len(self.processes) == 3

    def sizes(self) -> list[int]:
        """Bytes; raises psutil.NoSuchProcess for one that has died."""
        return [process.memory_info().rss for process in self.processes]

    def check(self, before: list[int]) -> None:
        for process, old, new in zip(self.processes, before, self.sizes(), strict=True):
            name = process.cmdline()[3]
            allowed = WORKER_GROWTH if name == "worker" else max(GROWTH, old // 20)
            assert new - old <= allowed, f"the {name} grew from {old >> 20} to {new >> 20} MiB"


def beside_good_streams(service: Service, attack: Callable[[int], None], count: int) -> None:
    """Runs the attack in two parts, with streams beside it from the first to the last byte."""
    fleet = Fleet(service)
    done = threading.Event()
    with grpc.insecure_channel(service.target) as channel, ThreadPoolExecutor(1) as pool:
        stub = pb_grpc.GenerationStub(channel)
        good = pool.submit(run_good_streams, stub, done)
        try:
            attack(count // 5)
            before = fleet.sizes()
            attack(count - count // 5)
        finally:
            done.set()
        assert good.result(120) >= 1
    service.wait_until_idle()
    fleet.check(before)


def run_good_streams(stub: Any, done: threading.Event) -> int:
    """Streams that must come out as they do alone; returns how many."""
    count = 0
    for line in golden("greedy") * 100:
        length = len(line["output_token_ids"])
        answer = stream(stub, request(line["prompt_token_ids"], temperature=0.0, max_tokens=length))
        assert answer.samples[0].token_ids == line["output_token_ids"]
        assert answer.samples[0].text == line["output_text"]
        count += 1
        if done.is_set():
            break
    return count


# -- between the planes -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", FRAMES)
@pytest.mark.parametrize("port", ["gateway", "worker"])
def test_frames_at_the_control_plane(target: Service, port: str, count: int) -> None:
    rng = random.Random(count)
    digest = open_model("demo").info().digest
    address = ("127.0.0.1", int(str(target.options[f"{port}_port"])))
    if port == "gateway":
        messages = functools.partial(gateway_messages, digest=digest)
        identities = [gateway_identity]
    else:
        messages, identities = functools.partial(worker_messages), [control_identity, data_identity]
    refused = f'octavo_frames_refused_total{{socket="{port}"}}'
    before = target.metrics()[refused]

    def attack(count: int) -> None:
        """In portions, each read before the next: queues of ZeroMQ are not what is weighed."""
        speak_no_zmq(rng, address)
        for _ in range(0, count, PORTION):
            seen = target.metrics()[refused]
            with zmq.Context() as context:
                for _ in range(0, min(count, PORTION), FRAMES_PER_CONNECTION):
                    incarnation = rng.getrandbits(63)
                    known = rng.choice(identities)(incarnation)
                    identity = known if rng.random() < 0.8 else b"x" + rng.randbytes(8)
                    send_all(context, address, identity, rng, messages(incarnation))
            most = seen + min(count, PORTION) / 2
            wait_for(lambda most=most: target.metrics()[refused] > most, "most are refused", 60)

    beside_good_streams(target, attack, count)
    assert target.metrics()[refused] - before > count / 2


def send_all(
    context: zmq.Context[zmq.Socket[bytes]],
    address: tuple[str, int],
    identity: bytes,
    rng: random.Random,
    real: list[bytes],
) -> None:
    """A peer that says something right, then much that is not, and never listens."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.setsockopt(zmq.LINGER, 10_000)
        dealer.setsockopt(zmq.SNDTIMEO, 20_000)
        dealer.connect(f"tcp://{address[0]}:{address[1]}")
        dealer.send(real[0])
        for parts in frames(rng, real, FRAMES_PER_CONNECTION):
            dealer.send_multipart(parts)


def speak_no_zmq(rng: random.Random, address: tuple[str, int]) -> None:
    """Connections that are no peer's: noise, a promise of 2^62 bytes, silence."""
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48
    for data in (
        rng.randbytes(100),
        greeting + b"\x06\x40\0\0\0\0\0\0\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ):
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(data)


# -- at the gateway -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", REQUESTS)
def test_http_requests(target: Service, count: int) -> None:
    rng = random.Random(count)
    statuses: dict[int, int] = {}

    def attack(count: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            requests = [http_request(rng, "SmolLM2-135M-Instruct") for _ in range(count)]
            for status in pool.map(lambda data: ask_http(target.http_port, data), requests):
                statuses[status] = statuses.get(status, 0) + 1

    beside_good_streams(target, attack, count)
    assert not {status for status in statuses if status >= 500}, statuses
    assert statuses[400] > count / 4, statuses
    assert get(f"{target.http}/ready")[0] == 200


def ask_http(port: int, data: bytes) -> int:
    """The status of the answer; 0 where the connection just ended. Then it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection)
            response.begin()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0


@pytest.mark.parametrize("count", REQUESTS)
def test_grpc_messages(target: Service, count: int) -> None:
    rng = random.Random(count)
    codes: dict[str, int] = {}
    small = pb.SamplingParams(max_tokens=1, stop=["x"], logit_bias={5: 1.5}, seed=7)
    ids = pb.TokenIds(ids=[1, 2, 3])
    real: list[tuple[str, bytes]] = [
        ("Generate", pb.GenerateRequest(text="hello", sampling=small).SerializeToString()),
        ("GenerateUnary", pb.GenerateRequest(token_ids=ids, sampling=small).SerializeToString()),
        ("Tokenize", pb.TokenizeRequest(text="hello there").SerializeToString()),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 2, 3]).SerializeToString()),
    ]

    def attack(count: int) -> None:
        with grpc.insecure_channel(target.target) as channel, ThreadPoolExecutor(4) as pool:
            calls = [grpc_call(rng, real) for _ in range(count)]
            for code in pool.map(lambda call: ask_grpc(channel, *call), calls):
                codes[code] = codes.get(code, 0) + 1

    beside_good_streams(target, attack, count)
    known = {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "DEADLINE_EXCEEDED"}
    assert set(codes) <= known, codes
    assert codes["INVALID_ARGUMENT"] > count / 4, codes


def ask_grpc(channel: grpc.Channel, method: str, message: bytes) -> str:
    """The status of a call, which a stream's first message makes OK.

    What a mutated call that is right after all asks for may take longer than is worth waiting for.
    """
    path = f"/octavo.v1.Generation/{method}"
    try:
        if method == "Generate":
            call = channel.unary_stream(path)(message, timeout=1)
            next(call, None)
            call.cancel()
        else:
            channel.unary_unary(path)(message, timeout=1)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
