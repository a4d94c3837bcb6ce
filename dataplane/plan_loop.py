"""The worker's main thread: resets and plans in, results out."""

import logging
import time
from dataclasses import dataclass

import zmq

from octavo.common.logs import LimitedLog
from octavo.common.loop_socket import Socket
from octavo.dataplane.engine import Engine
from octavo.dataplane.heartbeat import Progress
from octavo.dataplane.links import Line, send
from octavo.dataplane.metrics import WorkerMetrics
from octavo.dataplane.parallel.collectives import CollectiveError
from octavo.dataplane.parallel.gang import Gang, split_address
from octavo.dataplane.runner import Runner, UnderWay
from octavo.dataplane.slots import PlanError, Slots
from octavo.dataplane.stopping import StopSignal
from octavo.kernels.table import Kernels
from octavo.proto.plan import Fault, Plan, Result
from octavo.proto.session import Ready, Refused, Register, Reset, Seat, WorkerBye
from octavo.proto.wire import ProtocolError, unpack

log = logging.getLogger(__name__)

MAX_SLOTS = 65_536
_REDIAL_MS = 500


class RefusedByControlPlane(Exception):  # noqa: N818 (an answer, not a fault)
    """This worker cannot take part; the text says why."""


class Epoch:
    """What one reset set up: slots, and the number of the plan that comes next."""

    def __init__(self, reset: Reset, engine: Engine, kernels: Kernels, vocab_size: int) -> None:
        self.reset = reset
        self.slots = Slots(reset.num_slots, reset.max_model_len, reset.block_size, vocab_size)
        self.runner = Runner(engine, kernels, self.slots, reset.max_batched_tokens)
        self.next_plan = 0
        self.faulted = False  # nothing more is run or reported until the next reset


@dataclass(frozen=True)
class Started:
    """A plan whose result is to be sent."""

    epoch: Epoch
    under_way: UnderWay
    arrived: float  # perf_counter seconds


class PlanLoop:
    """Owns the data socket, the engine and the epoch."""

    def __init__(
        self,
        data: Line,
        heart: Socket,
        register: Register,
        engine: Engine,
        kernels: Kernels,
        progress: Progress,
        metrics: WorkerMetrics,
        gang: Gang | None = None,
    ) -> None:
        """
        Args:
            gang: of several ranks, if this worker has one of them.
        """
        self._gang = gang
        self._data, self._heart, self._register = data, heart, register
        self._engine, self._kernels = engine, kernels
        self._progress, self._metrics = progress, metrics
        self._epoch: Epoch | None = None
        self._started: Started | None = None
        self._pool_shape: tuple[int, int, int] | None = None
        self._limited = LimitedLog(log)

    def run(self, stop: StopSignal) -> None:
        """Works until the stop signal, then says goodbye.

        Raises:
            RefusedByControlPlane: the control plane does not take this worker.
            EngineError: the pools that a reset asks for cannot be made.
        """
        poller = zmq.Poller()
        for readable in (self._data.socket, self._data.monitor, self._heart, stop.descriptor):
            poller.register(readable, zmq.POLLIN)
        try:
            while not stop.requested:
                # With a plan under way only what has arrived already comes before its result.
                self._step(dict(poller.poll(0 if self._started else None)), stop)
        finally:
            send(self._heart, WorkerBye(incarnation=self._register.incarnation).pack())

    def _step(self, events: dict[object, int], stop: StopSignal) -> None:
        if stop.descriptor in events:
            stop.clear()
        if self._data.monitor in events:
            self._data.watch()
        if self._heart in events:
            self._on_heart(self._heart.recv(), stop)
        elif self._data.socket in events:
            self._on_data(self._data.socket.recv_multipart(), time.perf_counter())
        elif self._started is not None:
            self._complete()

    # -- resets -----------------------------------------------------------------------------------

    def _on_heart(self, frame: bytes, stop: StopSignal) -> None:
        message = unpack(frame, Seat, Reset, Refused)
        if isinstance(message, Refused):
            raise RefusedByControlPlane(message.reason)
        assert isinstance(message, Seat | Reset)
        check_seat(message, self._register)
        if isinstance(message, Seat):
            return
        self._progress.taken = message.epoch
        try:
            check_reset(message, self._register)
        except ProtocolError as error:
            log.error("refused a reset: %s", error)
            return
        if self._reset(message, stop) and self._connected(stop):
            ready = Ready(incarnation=self._register.incarnation, epoch=message.epoch)
            send(self._heart, ready.pack())

    def _reset(self, reset: Reset, stop: StopSignal) -> bool:
        """False when the other ranks of the gang are not there."""
        self._epoch = self._started = None
        if self._gang is not None:
            self._gang.leave()
        self._make_pools(reset)
        if self._gang is not None and not self._join(self._gang, reset, stop):
            return False
        self._epoch = Epoch(reset, self._engine, self._kernels, self._register.model.vocab_size)
        self._progress.done = (reset.epoch, 0)
        self._metrics.watch_slots(self._epoch.slots)
        log.info(
            "joined epoch %d as rank %d of %d: %d blocks of %d tokens, %d swap blocks, %d slots",
            reset.epoch,
            reset.rank,
            reset.gang_size,
            reset.num_blocks,
            reset.block_size,
            reset.num_cpu_blocks,
            reset.num_slots,
        )
        return True

    def _make_pools(self, reset: Reset) -> None:
        shape = (reset.num_blocks, reset.block_size, reset.num_cpu_blocks)
        if shape != self._pool_shape:
            self._pool_shape = None
            self._engine.make_pools(*shape)
            self._engine.warm_up(reset.num_slots)
            self._pool_shape = shape
        self._metrics.set_pools(reset.num_blocks, reset.num_cpu_blocks)

    def _join(self, gang: Gang, reset: Reset, stop: StopSignal) -> bool:
        """False when a newer message or the stop signal comes first, or there is no meeting."""
        try:
            return gang.join(reset, lambda: stop.requested or bool(self._heart.poll(0)))
        except CollectiveError as error:
            log.error("%s", error)
            self._metrics.faults.inc()
            fault = Fault(epoch=reset.epoch, number=0, rank=reset.rank, reason=str(error)[:4096])
            send(self._data.socket, fault.pack())
            return False

    def _connected(self, stop: StopSignal) -> bool:
        """Waits until plans can arrive; False when a newer message or the stop signal comes first.

        After a restart of the control plane the control socket may be back before the data socket.
        """
        poller = zmq.Poller()
        poller.register(self._data.socket, zmq.POLLOUT)
        for readable in (self._data.monitor, self._heart, stop.descriptor):
            poller.register(readable, zmq.POLLIN)
        while True:
            events = dict(poller.poll(_REDIAL_MS))
            if self._heart in events or stop.descriptor in events:
                return False
            if self._data.socket in events:
                return True
            self._data.watch()
            self._data.redial()

    # -- plans ------------------------------------------------------------------------------------

    def _on_data(self, frames: list[bytes], arrived: float) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"frame: a message of {len(frames)} parts")
            plan = Plan.unpack(frames[0])
        except ProtocolError as error:
            self._metrics.refused_frames.inc()
            self._limited.warning("frame", "refused a frame on the data socket: %s", error)
            return
        epoch = self._epoch
        if epoch is None or plan.epoch != epoch.reset.epoch:
            self._metrics.stale_plans.inc()
            return
        if not epoch.faulted:
            self._run_plan(epoch, plan, arrived)

    def _run_plan(self, epoch: Epoch, plan: Plan, arrived: float) -> None:
        """Starts a plan, beside the one that is under way if that is possible."""
        try:
            under_way = self._start(epoch, plan)
        except Exception as error:
            if self._started is not None:
                self._complete()
            self._report(epoch, plan, error)
            return
        epoch.next_plan += 1
        if self._started is not None:
            self._complete()
        self._started = Started(epoch, under_way, arrived)
        if not self._engine.overlaps:
            self._complete()

    def _start(self, epoch: Epoch, plan: Plan) -> UnderWay:
        reset = epoch.reset
        if plan.number != epoch.next_plan:
            raise PlanError(f"its number is wrong: {epoch.next_plan} comes next")
        plan.validate(reset.num_slots, reset.num_blocks, reset.num_cpu_blocks)
        if self._started is not None and not epoch.runner.can_start(plan):
            self._complete()
        return epoch.runner.start(plan)

    def _complete(self) -> None:
        """Waits for the plan under way and sends its result."""
        started, self._started = self._started, None
        assert started is not None
        epoch, plan = started.epoch, started.under_way.plan
        if epoch.faulted:
            return
        try:
            result = epoch.runner.finish(started.under_way, epoch.reset.rank)
        except Exception as error:
            self._report(epoch, plan, error)
            return
        result.timings.total = time.perf_counter() - started.arrived
        self._send(plan, result)  # first of all: the control plane waits for it
        self._progress.done = (plan.epoch, plan.number + 1)
        self._metrics.count_plan(plan, result.timings)

    def _report(self, epoch: Epoch, plan: Plan, error: Exception) -> None:
        """Tells the gang of a plan that could not be run; called where the error is handled."""
        if isinstance(error, (PlanError, ProtocolError, CollectiveError)):
            reason = str(error)
        else:  # whatever it is, the gang must hear of it
            log.exception("plan %d of epoch %d failed", plan.number, plan.epoch)
            reason = f"{type(error).__name__} while running; see this worker's log"
        epoch.faulted = True
        self._metrics.faults.inc()
        log.error("plan %d of epoch %d: %s", plan.number, plan.epoch, reason)
        rank = epoch.reset.rank
        self._send(plan, Fault(epoch=plan.epoch, number=plan.number, rank=rank, reason=reason[:4096]))

    def _send(self, plan: Plan, answer: Result | Fault) -> None:
        if not send(self._data.socket, answer.pack()):
            log.warning("plan %d: its result was dropped, there is no connection", plan.number)


def check_seat(message: Seat | Reset, register: Register) -> None:
    """Raises RefusedByControlPlane for another seat than that whose weights this worker has."""
    if register.tensor_parallel == 1:
        return
    given, held = (message.gang, message.rank), (register.gang, register.rank)
    if given != held:
        raise RefusedByControlPlane(
            "it gives rank {1} of gang {0}, ".format(*given)
            + "and this worker has the weights of rank {1} of gang {0}: start it again".format(*held)
        )


def check_reset(reset: Reset, register: Register) -> None:
    """Raises ProtocolError for sizes that make no sense."""
    for name, low, high in (
        ("block_size", 1, 1 << 16),
        ("num_slots", 1, MAX_SLOTS),
        ("max_batched_tokens", 1, 1 << 24),
        ("max_model_len", 1, register.model.max_model_len),
        ("num_blocks", 1, 1 << 31),
        ("num_cpu_blocks", 0, 1 << 31),
    ):
        if not low <= getattr(reset, name) <= high:
            raise ProtocolError(f"reset.{name}: not in [{low}, {high}]")
    if reset.num_blocks * reset.block_size >= 1 << 31:
        raise ProtocolError("reset.num_blocks: more than 2^31 tokens")
    size = register.tensor_parallel
    if reset.gang_size != size or not 0 <= reset.rank < size:
        raise ProtocolError(f"reset.gang_size: this worker is a rank of a gang of {size}")
    if size > 1:
        split_address(reset.rendezvous)
