"""The control plane: sockets in, decisions out.

Everything runs on one event loop, so no state is shared between threads; probes read plain numbers.
"""

import logging
import secrets
import time

import zmq

from octavo.common.curve import server_keys
from octavo.common.logs import LimitedLog
from octavo.controlplane.counters import Counters
from octavo.controlplane.gang import Gang, Rank, RankRefused, shape_of, speeds_of
from octavo.controlplane.gateways import Gateway
from octavo.controlplane.metrics import Metrics
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.peers import Peers
from octavo.controlplane.pins import PrefixRefused, PrefixRegistry
from octavo.controlplane.reception import Reception, Refusal
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sockets import RouterSocket, Unreachable
from octavo.proto.plan import Fault, Result
from octavo.proto.session import (
    BeatAnswer,
    Cancel,
    Failure,
    GatewayBeat,
    Hello,
    Info,
    InfoQuery,
    Pin,
    Pins,
    PinsQuery,
    Ready,
    Refused,
    Register,
    Submit,
    Unpin,
    Welcome,
    WorkerBeat,
    WorkerBye,
    control_identity,
    gateway_identity,
)
from octavo.proto.wire import Int32s, Message, ProtocolError, unpack

log = logging.getLogger("octavo.controlplane")

_MAX_FAULTS = 3  # plans in a row that a gang may fail before its requests do


class ControlPlane:
    """One gang of one worker, any number of gateways."""

    def __init__(self, options: ControlPlaneOptions) -> None:
        self.options = options
        self.incarnation = secrets.randbits(63)
        self.counters = Counters()
        self.reception = Reception(options)
        self.prefixes = PrefixRegistry(self.reception.waiting, options.max_pinned)
        # Epochs of a later control plane must be larger than ours, whenever it starts.
        self.gang = Gang(number=0, epoch=time.time_ns() // 1_000_000)
        self.refused = {"worker": 0, "gateway": 0}
        self._limited = LimitedLog(log)
        self._pumped_at = time.perf_counter()
        self._context = zmq.Context()
        self.peers = Peers(self._context, server_keys(options.curve_keys))
        self.metrics = Metrics(self.info, self.counters, self.refused, self.peers.refused)
        bind = f"tcp://{options.controlplane_bind}"
        self.workers = RouterSocket(
            self._context,
            f"{bind}:{options.worker_port}",
            self._on_worker_frame,
            self._pump,
            lambda socket: self.peers.guard(socket, "worker"),
        )
        self.clients = RouterSocket(
            self._context,
            f"{bind}:{options.gateway_port}",
            self._on_gateway_frame,
            self._pump,
            lambda socket: self.peers.guard(socket, "gateway"),
        )

    def close(self) -> None:
        self.peers.close()
        self.workers.close()
        self.clients.close()
        self._context.term()

    @property
    def scheduler(self) -> Scheduler | None:
        return self.gang.scheduler

    # -- workers -----------------------------------------------------------------------------------

    def _on_worker_frame(self, identity: bytes, frame: bytes) -> None:
        try:
            message = unpack(frame, Result, WorkerBeat, Register, Ready, Fault, WorkerBye)
            self._on_worker_message(identity, message)
        except ProtocolError as error:
            self._refuse_frame("worker", error)

    def _on_worker_message(self, identity: bytes, message: Message) -> None:
        match message:
            case Result():
                self._on_result(identity, message)
            case Register():
                _check_identity(identity, control_identity(message.incarnation))
                self._on_register(message)
            case WorkerBeat():
                _check_identity(identity, control_identity(message.incarnation))
                self._on_worker_beat(message)
            case Ready():
                _check_identity(identity, control_identity(message.incarnation))
                self._on_ready(message)
            case Fault():
                self._on_fault(identity, message)
            case WorkerBye():
                _check_identity(identity, control_identity(message.incarnation))
                if self._is_rank(message.incarnation):
                    self._lose_gang("the worker stops in order", logging.INFO)

    def _is_rank(self, incarnation: int) -> bool:
        return self.gang.rank is not None and self.gang.rank.register.incarnation == incarnation

    def _on_register(self, register: Register) -> None:
        rank = Rank(register)
        if self.gang.rank is not None and not self._is_rank(register.incarnation):
            if self._is_reachable(self.gang.rank):
                self._refuse_worker(rank, "the gang is complete: another worker serves already")
                return
            self._lose_gang("its worker is gone, another one registers")
        self._form_gang(rank)

    def _is_reachable(self, rank: Rank) -> bool:
        answer = BeatAnswer(controlplane=self.incarnation, known=True)
        try:
            self.workers.send(rank.control, answer.pack())
        except Unreachable:
            return False
        return True

    def _form_gang(self, rank: Rank) -> None:
        """A new epoch with this worker; everything it held before is to be recomputed."""
        gang = self.gang
        try:
            shape = shape_of(rank.register, self.options, gang.epoch + 1)
        except RankRefused as refusal:
            self._refuse_worker(rank, str(refusal))
            return
        gang.epoch, gang.rank, gang.ready = shape.epoch, rank, False
        gang.plan_sent_at.clear()
        if gang.scheduler is None:
            gang.scheduler = Scheduler(shape, self.reception.waiting, self.counters)
        else:
            gang.scheduler.reset(shape)
        gang.scheduler.speeds = speeds_of(rank.register, shape.block_size)
        self._answer_pins(self.prefixes.recompute(gang.scheduler))
        self._send_worker(rank.control, gang.reset_message(self.incarnation))
        self._publish(gang.scheduler.take_outputs())
        log.info(
            "worker %x registered: %s engine on %s, %d blocks of %d tokens",
            rank.register.incarnation,
            rank.register.engine,
            rank.register.device,
            shape.num_blocks,
            shape.block_size,
        )

    def _refuse_worker(self, rank: Rank, reason: str) -> None:
        log.error("worker %x refused: %s", rank.register.incarnation, reason)
        self._send_worker(rank.control, Refused(reason=reason))

    def _on_ready(self, ready: Ready) -> None:
        if not self._is_rank(ready.incarnation) or ready.epoch != self.gang.epoch or self.gang.ready:
            return
        self.gang.ready = True
        log.info("gang 0 is ready")
        self._welcome_all()

    def _on_worker_beat(self, beat: WorkerBeat) -> None:
        known = self._is_rank(beat.incarnation)
        if known and self.gang.rank is not None:
            self.gang.rank.last_seen = time.monotonic()
        answer = BeatAnswer(controlplane=self.incarnation, known=known)
        self._send_worker(control_identity(beat.incarnation), answer)

    def _on_result(self, identity: bytes, result: Result) -> None:
        gang = self.gang
        if gang.scheduler is None or gang.rank is None or identity != gang.rank.data:
            return
        if not gang.ready or result.epoch != gang.epoch:
            return
        started = time.perf_counter()
        self.metrics.phase["wait"].observe(started - self._pumped_at)
        try:
            outputs = gang.scheduler.process(result)
        except ProtocolError as error:
            self._refuse_frame("worker", error)
            self._lose_gang("its result does not match the plan")
            return
        processed = time.perf_counter()
        self.metrics.plan_seconds.observe(time.monotonic() - gang.plan_sent_at.pop(0))
        gang.faults_in_a_row = 0
        self._publish(outputs)
        self.metrics.phase["process"].observe(processed - started)
        self.metrics.phase["publish"].observe(time.perf_counter() - processed)

    def _on_fault(self, identity: bytes, fault: Fault) -> None:
        gang = self.gang
        if gang.rank is None or identity != gang.rank.data or fault.epoch != gang.epoch:
            return
        log.error("plan %d failed on rank %d: %s", fault.number, fault.rank, fault.reason)
        gang.faults_in_a_row += 1
        if gang.faults_in_a_row >= _MAX_FAULTS and gang.scheduler is not None:
            gang.faults_in_a_row = 0
            gang.scheduler.fail_running("INTERNAL", "the worker failed every plan with this request")
        self._form_gang(gang.rank)

    def _lose_gang(self, why: str, level: int = logging.WARNING) -> None:
        """The worker is gone: its groups wait to be recomputed by the next one."""
        gang = self.gang
        log.log(level, "gang 0 is lost: %s", why)
        gang.epoch += 1
        gang.rank, gang.ready = None, False
        gang.plan_sent_at.clear()
        if gang.scheduler is not None:
            gang.scheduler.reset(gang.scheduler.shape)
            self._answer_pins(self.prefixes.recompute(gang.scheduler))
        self._welcome_all()

    def _send_worker(self, identity: bytes, message: Message) -> None:
        try:
            self.workers.send(identity, message.pack())
        except Unreachable:
            log.debug("a worker went away before it could be answered")

    # -- gateways ----------------------------------------------------------------------------------

    def _on_gateway_frame(self, identity: bytes, frame: bytes) -> None:
        try:
            message = unpack(
                frame, Submit, Cancel, GatewayBeat, Hello, InfoQuery, Pin, Unpin, PinsQuery
            )
            self._on_gateway_message(identity, message)
        except ProtocolError as error:
            self._refuse_frame("gateway", error)

    def _on_gateway_message(self, identity: bytes, message: Message) -> None:
        match message:
            case Hello():
                _check_identity(identity, gateway_identity(message.incarnation))
                self._on_hello(message)
            case InfoQuery():
                info = self.info()
                info.query = message.query
                self._send_gateway(identity, info)
            case Submit() | Cancel() | GatewayBeat() | Pin() | Unpin() | PinsQuery():
                _check_identity(identity, gateway_identity(message.gateway))
                gateway = self.reception.gateways.get(message.gateway)
                if gateway is None:
                    unknown = BeatAnswer(controlplane=self.incarnation, known=False)
                    self._send_gateway(identity, unknown)
                    return
                gateway.last_seen = time.monotonic()
                self._on_request_message(gateway, message)

    def _on_request_message(self, gateway: Gateway, message: Message) -> None:
        match message:
            case Pin() | Unpin() | PinsQuery():
                self._on_prefix_message(gateway, message)
            case Submit():
                self._on_submit(gateway, message)
            case Cancel():
                self.reception.cancel(gateway, message, self.scheduler)
            case GatewayBeat():
                if len(message.requests) != len(message.attempts):
                    raise ProtocolError("gateway-beat.attempts: not as long as requests")
                for group in gateway.unwanted(message):
                    self.reception.cancel_group(group, set(), self.scheduler)
                missing, attempts = gateway.missing(message)
                answer = BeatAnswer(
                    controlplane=self.incarnation,
                    known=True,
                    missing=missing,
                    missing_attempts=attempts,
                )
                self._send_gateway(gateway.identity, answer)

    def _on_prefix_message(self, gateway: Gateway, message: Pin | Unpin | PinsQuery) -> None:
        try:
            answer = self._answer_prefix_message(message)
        except PrefixRefused as refusal:
            answer = Pins(query=message.query, code=refusal.code, reason=refusal.reason)
        if answer is not None:
            self._send_gateway(gateway.identity, answer)

    def _answer_prefix_message(self, message: Pin | Unpin | PinsQuery) -> Pins | None:
        """The answer, or None where it follows once the prefix is computed."""
        if isinstance(message, PinsQuery):
            return Pins(query=message.query, pins=self.prefixes.states(self.scheduler))
        if isinstance(message, Unpin):
            self._answer_pins(self.prefixes.unregister(message.name, self.scheduler))
            return Pins(query=message.query)
        if self.scheduler is None or not self.gang.ready:
            raise PrefixRefused("UNAVAILABLE", "no worker is ready to compute a prefix; retry later")
        try:
            self._check_tokens(message.tokens)
        except Refusal as refusal:
            raise PrefixRefused(refusal.code, refusal.reason) from refusal
        return self.prefixes.register(message, self.scheduler)

    def _on_hello(self, hello: Hello) -> None:
        rank = self.gang.rank
        if rank is not None and rank.register.model.digest != hello.model_digest:
            reason = (
                "the gateway's model differs from the worker's "
                f"({rank.register.model.name}): start both with the same --model"
            )
            log.error("gateway %x refused: %s", hello.incarnation, reason)
            self._send_gateway(gateway_identity(hello.incarnation), Refused(reason=reason))
            return
        gateway = self.reception.gateways.add(hello.incarnation)
        gateway.last_seen = time.monotonic()
        self._send_gateway(gateway.identity, self._welcome())

    def _on_submit(self, gateway: Gateway, submit: Submit) -> None:
        try:
            self._check_tokens(submit.prompt)
            self.reception.submit(gateway, submit, self.scheduler)
        except Refusal as refusal:
            failure = Failure(
                controlplane=self.incarnation,
                request=submit.request,
                attempt=submit.attempt,
                code=refusal.code,
                reason=refusal.reason,
            )
            self._send_gateway(gateway.identity, failure)

    def _check_tokens(self, prompt: Int32s) -> None:
        rank = self.gang.rank
        if rank is None or not len(prompt):
            return
        vocab_size = rank.register.model.vocab_size
        if int(prompt.max()) >= vocab_size or int(prompt.min()) < 0:
            raise Refusal("INVALID_ARGUMENT", f"prompt: a token id is not in [0, {vocab_size})")

    def _welcome(self) -> Welcome:
        welcome = Welcome(
            controlplane=self.incarnation, ready=self.gang.ready, lease=self.options.lease
        )
        if self.scheduler is not None:
            welcome.max_model_len = self.scheduler.shape.max_model_len
            welcome.max_sequences = self.scheduler.shape.num_slots
        return welcome

    def _welcome_all(self) -> None:
        for gateway in self.reception.gateways.all():
            self._send_gateway(gateway.identity, self._welcome())

    def _publish(self, outputs: Outputs) -> None:
        """Sends each gateway its part, and forgets the groups that ended."""
        for incarnation, tokens in outputs.token_messages(self.incarnation):
            self._send_gateway(gateway_identity(incarnation), tokens)
        for incarnation, failure in outputs.failure_messages(self.incarnation):
            self._send_gateway(gateway_identity(incarnation), failure)
        for group in outputs.ended:
            self.reception.gateways.forget(group.id, group)
        if outputs.ended_prefixes and self.scheduler is not None:
            self._answer_pins(self.prefixes.computed(outputs.ended_prefixes, self.scheduler))

    def _answer_pins(self, answers: list[tuple[int, Pins]]) -> None:
        for incarnation, pins in answers:
            self._send_gateway(gateway_identity(incarnation), pins)

    def _send_gateway(self, identity: bytes, message: Message) -> None:
        try:
            self.clients.send(identity, message.pack())
        except Unreachable:
            # It finds the gap when it reads again, or its lease runs out.
            log.debug("a message to a gateway was lost")

    # -- the loop ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Keeps as many plans in flight as there is work for."""
        gang = self.gang
        if gang.scheduler is None:
            return
        while gang.ready and gang.scheduler.num_in_flight < self.options.pipeline_depth:
            if not self._send_plan(gang, gang.scheduler):
                break
        self._publish(gang.scheduler.take_outputs())
        self._pumped_at = time.perf_counter()

    def _send_plan(self, gang: Gang, scheduler: Scheduler) -> bool:
        started = time.perf_counter()
        plan = scheduler.schedule()
        if plan is None:
            return False
        scheduled = time.perf_counter()
        frame = plan.pack()
        self.metrics.phase["schedule"].observe(scheduled - started)
        self.metrics.phase["pack"].observe(time.perf_counter() - scheduled)
        assert gang.rank is not None
        try:
            self.workers.send(gang.rank.data, frame)
        except Unreachable as error:
            self._lose_gang(f"its worker does not take plans: {error}")
            return False
        gang.plan_sent_at.append(time.monotonic())
        return True

    def tick(self) -> None:
        """Looks for the dead: after draining, since the judge itself may have slept."""
        self.workers.drain()
        self.clients.drain()
        for gateway in self.reception.gateways.silent():
            log.warning("gateway %x is silent: its requests are freed", gateway.incarnation)
            self.reception.drop_gateway(gateway, self.scheduler)
        self._judge_worker()
        self._pump()
        if self.scheduler is not None:
            self.metrics.look_at(self.scheduler)
            if self.scheduler.is_idle:
                self.scheduler.check()

    def _judge_worker(self) -> None:
        gang, now = self.gang, time.monotonic()
        if gang.rank is None:
            return
        if now - gang.rank.last_seen > self.options.heartbeat_timeout:
            self._lose_gang(f"no heartbeat for {self.options.heartbeat_timeout:g} s")
        elif gang.plan_sent_at and now - gang.plan_sent_at[0] > self.options.plan_timeout:
            self._lose_gang(f"a plan is unanswered for {self.options.plan_timeout:g} s")
        elif not self._is_reachable(gang.rank):
            self._lose_gang("its worker's connection is closed")

    def _refuse_frame(self, socket: str, error: ProtocolError) -> None:
        self.refused[socket] += 1
        self._limited.warning(socket, "a frame on the %s port was refused: %s", socket, error)

    def info(self) -> Info:
        """The state that operators see. Called from the probe thread too: reads only."""
        scheduler = self.scheduler
        return Info(
            query=0,
            controlplane=self.incarnation,
            ready=self.gang.ready,
            waiting=len(self.reception.waiting),
            preempted=len(scheduler.preempted) if scheduler else 0,
            running=len(scheduler.running) if scheduler else 0,
            gangs=[self.gang.state()] if self.gang.rank is not None else [],
        )


def _check_identity(actual: bytes, expected: bytes) -> None:
    if actual != expected:
        raise ProtocolError("incarnation: not that of the sender's routing id")
