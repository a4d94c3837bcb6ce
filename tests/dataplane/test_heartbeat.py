"""The thread that keeps a worker known: what it says to whom, and when it ends a stuck process."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from controlplane_side import ControlPlaneSide, reset_message
from test_worker_sizes import MODEL

from octavo.common.loop_socket import Context, Socket
from octavo.dataplane.heartbeat import STUCK_EXIT, Heartbeat, Progress
from octavo.dataplane.links import Line, thread_pair
from octavo.proto.session import (
    Join,
    Ready,
    Register,
    Reset,
    Seat,
    WorkerBeat,
    WorkerBye,
    control_identity,
)
from octavo.proto.wire import unpack

WORKER = 77
JOIN = Join(incarnation=WORKER, tensor_parallel=2, model=MODEL)
REGISTER = Register(
    incarnation=WORKER, device="cpu", engine="torch", model=MODEL, tensor_parallel=2, gang=3, rank=1
)


@dataclass
class Beating:
    """A heartbeat that began with `Join`, its two ends, and what it was asked to interrupt."""

    side: ControlPlaneSide
    heart: Socket
    progress: Progress
    interrupted: list[int | None] = field(default_factory=list)

    def receive_by_main(self, kind: type[Seat] | type[Reset]) -> Seat | Reset:
        assert self.heart.poll(60_000)
        return unpack(self.heart.recv(), kind)

    def deny(self) -> None:
        """As a control plane that has just started answers a beat."""
        self.side.receive(WorkerBeat)
        self.side.answer_beat(known=False, worker=WORKER)


@pytest.fixture
def beating() -> Iterator[Beating]:
    side, context, progress = ControlPlaneSide(), Context(), Progress()
    control = Line(context, f"tcp://127.0.0.1:{side.port}", control_identity(WORKER), None)
    heart, main_end = thread_pair(context)
    made = Beating(side, heart, progress)
    thread = Heartbeat(control, main_end, JOIN, progress, "here", made.interrupted.append)
    thread.start()
    yield made
    heart.send(WorkerBye(incarnation=WORKER).pack())
    thread.join(60)
    assert not thread.is_alive()
    context.destroy(linger=0)
    side.close()


def test_a_seat_is_claimed_again_of_a_new_control_plane(beating: Beating) -> None:
    side = beating.side
    assert side.receive(Join).rank is None
    side.control(Seat(controlplane=1, gang=3, rank=1), WORKER)
    assert beating.receive_by_main(Seat) == Seat(controlplane=1, gang=3, rank=1)
    beat = side.receive(WorkerBeat)
    assert (beat.epoch, beat.plans_done) == (0, 0)
    beating.deny()
    again = side.receive(Join)
    assert (again.incarnation, again.gang, again.rank) == (WORKER, 3, 1)


def test_a_loaded_worker_registers_and_not_joins(beating: Beating) -> None:
    side = beating.side
    side.receive(Join)
    side.control(Seat(controlplane=1, gang=3, rank=1), WORKER)
    beating.receive_by_main(Seat)
    beating.heart.send(REGISTER.pack())
    assert side.receive(Register).rank == 1
    assert side.receive(Register).rank == 1  # until there is a reset
    side.control(reset_message(1, 9, rank=1, gang_size=2, rendezvous="h:1"), WORKER)
    reset = beating.receive_by_main(Reset)
    assert isinstance(reset, Reset)
    beating.progress.taken = reset.epoch
    assert beating.interrupted == [9]
    beating.heart.send(Ready(incarnation=WORKER, epoch=9).pack())
    side.receive(Ready)
    beating.deny()
    assert side.receive(Register).gang == 3


STUCK = """
import sys, time
import zmq
from octavo.dataplane.heartbeat import Heartbeat, Progress
from octavo.dataplane.links import Line, thread_pair
from octavo.proto.session import Join, ModelInfo, control_identity
model = ModelInfo(name="tiny", family="llama", digest="d", vocab_size=300, max_model_len=256)
context = zmq.Context()
heart, main_end = thread_pair(context)
control = Line(context, "tcp://127.0.0.1:" + sys.argv[1], control_identity(77), None)
join = Join(incarnation=77, tensor_parallel=2, model=model)
Heartbeat(control, main_end, join, Progress(), "here", lambda epoch: None, stuck_seconds=0.5).start()
time.sleep(60)
"""


def test_a_main_thread_that_does_not_come_back_ends_the_process() -> None:
    side = ControlPlaneSide()
    command = [sys.executable, "-c", STUCK, str(side.port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        side.receive(Join)
        side.control(reset_message(1, 9), WORKER)
        _, logged = process.communicate(timeout=50)
        assert process.returncode == STUCK_EXIT
        assert "epoch 9 began" in logged
        assert "is stuck" in logged
    finally:
        process.kill()
        process.wait()
        side.close()
