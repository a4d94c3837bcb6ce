"""A real control plane process with workers that compute nothing and a gateway that notes everything.

The workers and the gateway live in the test: they speak the protocol over real sockets, one message at
a time, so that a test can make them die, fall silent, hang or lie.
"""

import json
import subprocess
import sys
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
from toy_worker import VOCAB, ToyWorker, expected_outputs

from octavo.controlplane.draft import Shape
from octavo.proto.plan import Fault, Plan, Sampling
from octavo.proto.session import (
    BeatAnswer,
    Failure,
    GatewayBeat,
    Hello,
    Info,
    InfoQuery,
    Join,
    ModelInfo,
    Ready,
    Refused,
    Register,
    Reset,
    SampleState,
    Seat,
    Submit,
    Tokens,
    Welcome,
    WorkerBeat,
    WorkerBye,
    control_identity,
    data_identity,
    gateway_identity,
)
from octavo.proto.wire import Message, int32s, unpack

PATIENCE = 40.0  # seconds; far above what anything here takes
MODEL = ModelInfo(name="toy", family="toy", digest="d", vocab_size=VOCAB + 10, max_model_len=64)
_RUN = """
import json, sys
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.process import main
sys.exit(main(ControlPlaneOptions(**json.loads(sys.argv[1]))))
"""


class Peer:
    """A DEALER socket and what arrives on it."""

    def __init__(self, context: zmq.Context[Any], port: int, identity: bytes) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, identity)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: Message) -> None:
        self.socket.send(message.pack())

    def received(self) -> list[bytes]:
        frames = []
        while self.socket.poll(0):
            frames.append(self.socket.recv())
        return frames


class ToyRank:
    """One worker. `holds` keeps its answers back, `silent` its beats, `lies` changes its digest."""

    def __init__(self, context: zmq.Context[Any], port: int, incarnation: int, **register: Any) -> None:
        self.incarnation = incarnation
        self.data = Peer(context, port, data_identity(incarnation))
        self.control = Peer(context, port, control_identity(incarnation))
        self.register = {"model": MODEL, "num_kv_blocks": 24, "swap_blocks": 0} | register
        self.holds = self.silent = self.lies = False
        self.deadly: int | None = None  # a plan that has this token in it kills the worker
        self.seat: Seat | None = None
        self.reset: Reset | None = None
        self.refused: str | None = None
        self.known = True
        self.worker: ToyWorker | None = None
        self.frames: deque[bytes] = deque()
        self.plans = 0

    def say_join(self) -> None:
        names = ("model", "tensor_parallel", "gang", "rank")
        chosen = {name: self.register[name] for name in names if name in self.register}
        self.control.send(Join(incarnation=self.incarnation, **chosen))

    def say_register(self) -> None:
        sizes = {"device": "cpu", "engine": "toy", "preferred_block_size": 4, "token_bytes": 8}
        self.control.send(Register(incarnation=self.incarnation, **sizes, **self.register))

    def say_bye(self) -> None:
        self.control.send(WorkerBye(incarnation=self.incarnation))

    def fault(self, reason: str) -> None:
        """Reports its oldest plan as failed."""
        plan = Plan.unpack(self.frames.popleft())
        fault = Fault(epoch=plan.epoch, number=plan.number, rank=0, reason=reason)
        self.data.send(fault)

    def die(self) -> None:
        self.data.socket.close()
        self.control.socket.close()

    @property
    def is_dead(self) -> bool:
        return bool(self.control.socket.closed)

    def live(self) -> None:
        """Hears what has come, beats, and runs what there is to run."""
        if self.is_dead:
            return
        for frame in self.control.received():
            self._hear(unpack(frame, Reset, Seat, BeatAnswer, Refused))
        self.frames += self.data.received()
        if not self.silent:
            self.control.send(WorkerBeat(incarnation=self.incarnation, epoch=0, plans_done=0))
        while self.frames and not self.holds and not self.is_dead:
            self._run(self.frames.popleft())

    def _hear(self, message: Message) -> None:
        match message:
            case Reset():
                self.reset = message
                self.worker = ToyWorker(_shape_of(message))
                self.frames.clear()
                self.control.send(Ready(incarnation=self.incarnation, epoch=message.epoch))
            case Seat():
                self.seat = message
            case BeatAnswer():
                self.known = message.known
            case Refused():
                self.refused = message.reason

    def _run(self, frame: bytes) -> None:
        plan = Plan.unpack(frame)
        assert self.reset is not None and self.worker is not None
        if plan.epoch != self.reset.epoch:
            return
        self.plans += 1
        if self.deadly is not None and self.deadly in self._tokens_read(plan):
            self.die()
            return
        result = self.worker.run(frame)
        result.rank = self.reset.rank
        result.digest = zlib.crc32(result.tokens.tobytes()) + self.lies
        self.data.send(result)

    def _tokens_read(self, plan: Plan) -> set[int]:
        assert self.worker is not None
        there = {slot: set(state.tokens) for slot, state in self.worker.slots.items()}
        there |= {admit.slot: set(admit.tokens.tolist()) for admit in plan.admits}
        rows = [*plan.decode_slots.tolist(), *plan.chunk_slots.tolist()]
        return set().union(*(there.get(slot, set()) for slot in rows))


def _shape_of(reset: Reset) -> Shape:
    return Shape(
        epoch=reset.epoch,
        block_size=reset.block_size,
        num_blocks=reset.num_blocks,
        num_cpu_blocks=reset.num_cpu_blocks,
        num_slots=reset.num_slots,
        max_model_len=reset.max_model_len,
        max_batched_tokens=reset.max_batched_tokens,
        prefill_chunk=reset.max_batched_tokens,
        watermark=0.0,
    )


@dataclass
class Heard:
    """What the gateway was told of one request."""

    tokens: list[int] = field(default_factory=list)
    finished: str = ""
    cached: int = 0
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return bool(self.finished) or self.failure is not None


class ToyGateway:
    """Submits requests of one sample and checks that every token comes once, in order."""

    INCARNATION = 99

    def __init__(self, context: zmq.Context[Any], port: int) -> None:
        self.peer = Peer(context, port, gateway_identity(self.INCARNATION))
        self.peer.send(Hello(incarnation=self.INCARNATION, model_digest=MODEL.digest))
        self.refused: str | None = None
        self.welcome: Welcome | None = None
        self.info: Info | None = None
        self.heard: dict[int, Heard] = defaultdict(Heard)
        self.submitted: dict[int, Submit] = {}

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        number = len(self.submitted) + 1
        sampling = Sampling(seed=number)
        submit = Submit(
            gateway=self.INCARNATION,
            request=number,
            attempt=0,
            arrival=float(number),
            priority=0,
            prompt=int32s(prompt),
            samples=[SampleState()],
            max_tokens=max_tokens,
            sampling=sampling,
        )
        self.submitted[number] = submit
        self.peer.send(submit)
        return number

    def ask_info(self) -> None:
        self.info = None
        self.peer.send(InfoQuery(query=1))

    def live(self) -> None:
        for frame in self.peer.received():
            self._hear(unpack(frame, Welcome, Tokens, Failure, BeatAnswer, Info, Refused))
        numbers = [number for number in self.submitted if not self.heard[number].ended]
        zeros = int32s([0] * len(numbers))
        beat = GatewayBeat(
            gateway=self.INCARNATION,
            newest=len(self.submitted),
            requests=int32s(numbers),
            attempts=zeros,
            offsets=zeros,
        )
        self.peer.send(beat)

    def _hear(self, message: Message) -> None:
        match message:
            case Welcome():
                self.welcome = message
            case Refused():
                self.refused = message.reason
            case Info():
                self.info = message
            case Failure():
                self.heard[message.request].failure = message
            case Tokens():
                self._take(message)

    def _take(self, message: Tokens) -> None:
        rows = zip(
            message.requests.tolist(), message.offsets.tolist(), message.tokens.tolist(), strict=True
        )
        for request, offset, token in rows:
            tokens = self.heard[request].tokens
            assert offset == len(tokens), (
                f"request {request}: offset {offset} after {len(tokens)} tokens"
            )
            tokens.append(token)
        for request, cached in zip(message.started.tolist(), message.cached.tolist(), strict=True):
            self.heard[request].cached = cached
        for finish in message.finishes:
            self.heard[finish.request].finished = finish.reason

    def check(self, number: int) -> None:
        """The request got exactly the tokens of an undisturbed run."""
        submit, heard = self.submitted[number], self.heard[number]
        assert heard.failure is None, heard.failure
        end = len(submit.prompt) + submit.max_tokens
        assert heard.tokens == expected_outputs(submit.prompt.tolist(), submit.sampling, 0, end, set())


class Scene:
    """The control plane process, its workers and its gateway. Use as a context manager."""

    def __init__(self, folder: Path, ports: list[int], **options: Any) -> None:
        self.log = folder / "controlplane.log"
        gateway_port, self.worker_port, probe_port = ports
        self._settings = {
            "gateway_port": gateway_port,
            "worker_port": self.worker_port,
            "controlplane_probe_port": probe_port,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
        } | options
        self.context: zmq.Context[Any] = zmq.Context()
        self.ranks: list[ToyRank] = []

    def __enter__(self) -> Self:
        with self.log.open("w") as log:
            command = [sys.executable, "-c", _RUN, json.dumps(self._settings)]
            self.process = subprocess.Popen(command, stderr=log)
        self.gateway = ToyGateway(self.context, int(self._settings["gateway_port"]))
        self.until(lambda: self.gateway.welcome is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)

    def rank(self, register: bool = True, **changes: Any) -> ToyRank:
        """A worker; it registers at once unless told otherwise."""
        rank = ToyRank(self.context, self.worker_port, 1000 + len(self.ranks), **changes)
        self.ranks.append(rank)
        if register:
            rank.say_register()
        return rank

    def ready(self, *ranks: ToyRank) -> None:
        """Until these workers have been reset and the service is ready."""
        self.until(lambda: all(rank.reset is not None for rank in ranks) and self.is_ready)

    @property
    def is_ready(self) -> bool:
        return self.gateway.welcome is not None and self.gateway.welcome.ready

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets everybody live until it is true."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            for rank in self.ranks:
                rank.live()
            self.gateway.live()
            time.sleep(0.01)

    def finish(self, *numbers: int) -> None:
        """Until these requests have ended."""
        self.until(lambda: all(self.gateway.heard[number].ended for number in numbers))

    def info(self) -> Info:
        """What the control plane says of itself."""
        self.gateway.ask_info()
        self.until(lambda: self.gateway.info is not None)
        assert self.gateway.info is not None
        return self.gateway.info

    def until_idle(self) -> None:
        """Until no block is held on any gang."""
        self.until(lambda: self._is_idle(self.info()))

    def _is_idle(self, info: Info) -> bool:
        pools = [pool for gang in info.gangs for pool in (gang.device_pool, gang.swap_pool)]
        assert all(p.free + p.cached + p.pinned + p.used == p.total for p in pools)
        groups = info.waiting + info.running + info.preempted
        return groups == 0 and not any(pool.used for pool in pools)
