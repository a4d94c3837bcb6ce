"""Speaks the control plane's side of the worker protocol to a real worker process."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, TypeVar

import zmq
from ports import free_ports

from octavo.proto.plan import Fault, Plan, Result
from octavo.proto.session import (
    BeatAnswer,
    Join,
    Ready,
    Register,
    Reset,
    Seat,
    WorkerBeat,
    WorkerBye,
    control_identity,
    data_identity,
)
from octavo.proto.wire import Message, unpack

M = TypeVar("M", bound=Message)

PATIENCE = 60.0  # seconds; far above what anything here takes
_RUN = """
import json, sys
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.worker import main
sys.exit(main(WorkerOptions(**json.loads(sys.argv[1]))))
"""


class WorkerProcess:
    """A worker of its own, logging to a file."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.probe_port = free_ports(1)[0]
        settings = {"worker_probe_port": self.probe_port, "threads": 1, "engine": "torch"} | options
        self._log = folder / f"worker-{self.probe_port}.log"
        command = [sys.executable, "-c", _RUN, json.dumps(settings)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text()

    def wait_for_log(self, text: str) -> None:
        """Until a line with `text` is there."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.log():
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.log()}"
            assert self.process.poll() is None, f"the worker has ended:\n{self.log()}"
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a probe."""
        url = f"http://127.0.0.1:{self.probe_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals it; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Ends it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class ControlPlaneSide:
    """A ROUTER that answers as a test tells it to."""

    _always: tuple[type[Message], ...] = (WorkerBeat, Join, Register, WorkerBye)

    def __init__(self, port: int | None = None, incarnation: int = 1) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = port or free_ports(1)[0]
        self.incarnation = incarnation
        self._router.bind(f"tcp://127.0.0.1:{self.port}")
        self.worker = 0  # incarnation of the worker that registered last

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, *kinds: type[M]) -> M:
        """The next message of one of these kinds; beats are answered on the way."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not self._router.poll(1000):
                continue
            identity, frame = self._router.recv_multipart()
            message: Message = unpack(frame, *kinds, *self._always)
            self._note(identity, message)
            if isinstance(message, kinds):
                return message
            if isinstance(message, WorkerBeat):
                self.answer_beat(known=self.knows(message.incarnation), worker=message.incarnation)
        raise AssertionError(f"no {[k.KIND for k in kinds]} came")

    def _note(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Register):
            self.worker = message.incarnation
            assert identity == control_identity(self.worker)

    def knows(self, incarnation: int) -> bool:
        return incarnation == self.worker

    def answer_beat(self, known: bool, worker: int | None = None) -> None:
        self.control(BeatAnswer(controlplane=self.incarnation, known=known), worker)

    def control(self, message: Message, worker: int | None = None) -> None:
        """Sends on a worker's control socket."""
        identity = control_identity(self.worker if worker is None else worker)
        self._router.send_multipart([identity, message.pack()])

    def data(self, *frames: bytes, worker: int | None = None) -> None:
        """Sends on a worker's data socket."""
        identity = data_identity(self.worker if worker is None else worker)
        self._router.send_multipart([identity, *frames])

    def frames(self, identity: bytes, *frames: bytes) -> None:
        """Sends what may be no message."""
        self._router.send_multipart([identity, *frames])

    def reset(self, epoch: int, **changes: Any) -> Ready:
        """Sends a reset and takes the acknowledgement."""
        self.control(reset_message(self.incarnation, epoch, **changes))
        ready = self.receive(Ready)
        assert (ready.incarnation, ready.epoch) == (self.worker, epoch)
        return ready


class GangSide(ControlPlaneSide):
    """The same for the ranks of one gang. Gives seats in the order in which workers ask."""

    _always = (*ControlPlaneSide._always, Ready, Result, Fault)  # of epochs that are over, too

    def __init__(self, size: int, port: int | None = None, incarnation: int = 1) -> None:
        super().__init__(port, incarnation)
        self.size = size
        self.seats: dict[int, int] = {}  # rank -> incarnation
        self.registers: dict[int, Register] = {}  # by rank

    def _note(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Join):
            self._seat(message)
        elif isinstance(message, Register) and self.knows(message.incarnation):
            assert message.rank is not None
            self.registers[message.rank] = message

    def _seat(self, join: Join) -> None:
        held = {incarnation: rank for rank, incarnation in self.seats.items()}
        free = [rank for rank in range(self.size) if rank not in self.seats]
        rank = held.get(join.incarnation, free[0] if join.rank is None else join.rank)
        self.seats[rank] = join.incarnation
        self.control(Seat(controlplane=self.incarnation, gang=0, rank=rank), join.incarnation)

    def knows(self, incarnation: int) -> bool:
        return incarnation in self.seats.values()

    def forget(self, rank: int) -> None:
        """Its worker is lost: the seat is free."""
        del self.seats[rank], self.registers[rank]

    def gather(self) -> None:
        """Until every rank has loaded."""
        while len(self.registers) < self.size:
            self.receive(Register)

    def reset_ranks(self, epoch: int, ranks: list[int] | None = None, **changes: Any) -> None:
        """Sends a reset to these ranks, by default all."""
        rendezvous = self.registers[0].rendezvous
        for rank in range(self.size) if ranks is None else ranks:
            own = {"rank": rank, "gang_size": self.size, "rendezvous": rendezvous}
            message = reset_message(self.incarnation, epoch, **(own | changes))
            self.control(message, self.seats[rank])

    def await_ready(self, epoch: int) -> None:
        """Until every rank has acknowledged the epoch."""
        ready: set[int] = set()
        while ready != set(self.seats.values()):
            message = self.receive(Ready)
            if message.epoch == epoch:
                ready.add(message.incarnation)

    def send_plan(self, plan: Plan) -> None:
        for incarnation in self.seats.values():
            self.data(plan.pack(), worker=incarnation)

    def run(self, plan: Plan) -> list[Result]:
        """The results of all ranks, by rank."""
        self.send_plan(plan)
        results: dict[int, Result] = {}
        while len(results) < self.size:
            result = self.receive(Result)
            if (result.epoch, result.number) == (plan.epoch, plan.number):
                results[result.rank] = result
        return [results[rank] for rank in range(self.size)]


def reset_message(controlplane: int, epoch: int, **changes: Any) -> Reset:
    """Small sizes: blocks of 4 tokens, sequences of up to 64."""
    sizes: dict[str, Any] = {
        "block_size": 4,
        "num_slots": 4,
        "max_batched_tokens": 64,
        "max_model_len": 64,
        "num_blocks": 32,
        "num_cpu_blocks": 4,
    }
    sizes |= {"gang": 0, "rank": 0, "gang_size": 1, "rendezvous": ""} | changes
    return Reset(controlplane=controlplane, epoch=epoch, **sizes)
