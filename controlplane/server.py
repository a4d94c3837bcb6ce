"""The control plane: sockets in, decisions out.

Everything runs on one event loop, so no state is shared between threads; probes read plain numbers.
"""

import logging
import secrets
import time

import zmq

from octavo.common.curve import server_keys
from octavo.common.logs import LimitedLog
from octavo.common.memory import Trimmer
from octavo.controlplane.counters import Counters
from octavo.controlplane.gang import Gang, Sent
from octavo.controlplane.gangs import Gangs
from octavo.controlplane.gateways import Gateway
from octavo.controlplane.metrics import Metrics
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.peers import Peers
from octavo.controlplane.pins import PrefixRefused, PrefixRegistry
from octavo.controlplane.placement import place
from octavo.controlplane.reception import Reception, Refusal
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sockets import RouterSocket, Unreachable
from octavo.proto.plan import Fault, Plan, Result
from octavo.proto.session import (
    BeatAnswer,
    Cancel,
    Failure,
    GatewayBeat,
    Hello,
    Info,
    InfoQuery,
    Join,
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
from octavo.proto.wire import Int32s, Message, ProtocolError, all_below, unpack

log = logging.getLogger("octavo.controlplane")


class ControlPlane:
    """Any number of gangs, any number of gateways."""

    def __init__(self, options: ControlPlaneOptions) -> None:
        self.options = options
        self.incarnation = secrets.randbits(63)
        self.counters = Counters()
        self.reception = Reception(options, lambda group: self.gangs.scheduler_of(group))
        waiting = self.reception.waiting
        self.prefixes = PrefixRegistry(waiting, options.max_pinned)
        self.gangs = Gangs(options, self.counters, waiting, self.prefixes, self)
        self.refused = {"worker": 0, "gateway": 0}
        self._limited = LimitedLog(log)
        self._pumped_at = time.monotonic()
        self._trimmer = Trimmer()
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
    def is_ready(self) -> bool:
        """Whether some gang can serve."""
        return bool(self.gangs.ready)

    # -- workers -----------------------------------------------------------------------------------

    def _on_worker_frame(self, identity: bytes, frame: bytes) -> None:
        try:
            message = unpack(frame, Result, WorkerBeat, Join, Register, Ready, Fault, WorkerBye)
            self._on_worker_message(identity, message)
        except ProtocolError as error:
            self._refuse_frame("worker", error)

    def _on_worker_message(self, identity: bytes, message: Message) -> None:
        match message:
            case Result():
                self._on_result(identity, message)
            case Fault():
                self.gangs.on_fault(identity, message)
            case Join() | Register() | WorkerBeat() | Ready() | WorkerBye():
                _check_identity(identity, control_identity(message.incarnation))
                self._on_control_message(message)

    def _on_control_message(self, message: Join | Register | WorkerBeat | Ready | WorkerBye) -> None:
        match message:
            case Join():
                self.gangs.on_join(message)
            case Register():
                self.gangs.on_register(message)
            case WorkerBeat():
                self.gangs.on_beat(message)
            case Ready():
                self.gangs.on_ready(message)
            case WorkerBye():
                self.gangs.on_bye(message)

    def _on_result(self, identity: bytes, result: Result) -> None:
        started = time.monotonic()
        answered = self.gangs.take_result(identity, result)
        if answered is None:
            return
        gang, result = answered
        assert gang.scheduler is not None
        self.metrics.phase["wait"].observe(started - self._pumped_at)
        try:
            outputs = gang.scheduler.process(result)
        except ProtocolError as error:
            self._refuse_frame("worker", error)
            self.gangs.lose(gang, list(gang.ranks.values()), "its result does not match the plan")
            return
        processed = time.monotonic()
        self.metrics.plan_seconds.observe(processed - gang.sent.popleft().at)
        gang.faults = 0
        self.publish(outputs, gang.scheduler)
        self.metrics.phase["process"].observe(processed - started)
        self.metrics.phase["publish"].observe(time.monotonic() - processed)

    def send_worker(self, identity: bytes, message: Message) -> bool:
        """Sends a worker what it must know; False where it is not connected."""
        try:
            self.workers.send(identity, message.pack())
        except Unreachable:
            log.debug("a worker went away before it could be answered")
            return False
        return True

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
                self.reception.cancel(gateway, message)
            case GatewayBeat():
                if len(message.requests) != len(message.attempts):
                    raise ProtocolError("gateway-beat.attempts: not as long as requests")
                for group in gateway.unwanted(message):
                    self.reception.cancel_group(group, set())
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
            return Pins(query=message.query, pins=self.prefixes.states())
        if isinstance(message, Unpin):
            self.answer_pins(self.prefixes.unregister(message.name, self.gangs.schedulers))
            return Pins(query=message.query)
        schedulers = self.gangs.ready_schedulers
        if not schedulers:
            raise PrefixRefused("UNAVAILABLE", "no worker is ready to compute a prefix; retry later")
        try:
            self._check_tokens("prompt", message.tokens)
        except Refusal as refusal:
            raise PrefixRefused(refusal.code, refusal.reason) from refusal
        return self.prefixes.register(message, schedulers)

    def _on_hello(self, hello: Hello) -> None:
        gateway = self.reception.gateways.add(hello.incarnation, hello.model_digest)
        gateway.last_seen = time.monotonic()
        if not self._refuse_stranger(gateway):
            self._send_gateway(gateway.identity, self._welcome())

    def _refuse_stranger(self, gateway: Gateway) -> bool:
        """Turns away a gateway that reads the tokens of another model than the workers'."""
        model = self.gangs.model
        if model is None or model.digest == gateway.model_digest:
            return False
        reason = (
            f"the gateway's model differs from the worker's ({model.name}): start both with the "
            "same --model"
        )
        log.error("gateway %x refused: %s", gateway.incarnation, reason)
        self._send_gateway(gateway.identity, Refused(reason=reason))
        self.reception.drop_gateway(gateway)
        return True

    def _on_submit(self, gateway: Gateway, submit: Submit) -> None:
        try:
            self._check_ids(submit)
            self.reception.submit(gateway, submit, self.gangs.roomiest)
        except Refusal as refusal:
            failure = Failure(
                controlplane=self.incarnation,
                request=submit.request,
                attempt=submit.attempt,
                code=refusal.code,
                reason=refusal.reason,
            )
            self._send_gateway(gateway.identity, failure)

    def _check_ids(self, submit: Submit) -> None:
        """Whatever names a token names one that there is. Raises Refusal."""
        sampling = submit.sampling
        self._check_tokens("prompt", submit.prompt)
        self._check_tokens("logit_bias", sampling.bias_ids)
        self._check_tokens("stop_token_ids", sampling.stop_token_ids)
        self._check_tokens("eos_token_ids", sampling.eos_token_ids)
        for state in submit.samples:
            self._check_tokens("samples", state.tokens)

    def _check_tokens(self, field: str, ids: Int32s) -> None:
        model = self.gangs.model
        if model is not None and not all_below(ids, model.vocab_size):
            raise Refusal("INVALID_ARGUMENT", f"{field}: a token id is not in [0, {model.vocab_size})")

    def _welcome(self) -> Welcome:
        welcome = Welcome(controlplane=self.incarnation, ready=self.is_ready, lease=self.options.lease)
        scheduler = self.gangs.roomiest
        if scheduler is not None:
            welcome.max_model_len = scheduler.shape.max_model_len
            welcome.max_sequences = scheduler.shape.num_slots
        return welcome

    def gangs_changed(self) -> None:
        """Tells every gateway what can be served now."""
        for gateway in self.reception.gateways.all():
            if not self._refuse_stranger(gateway):
                self._send_gateway(gateway.identity, self._welcome())

    def publish(self, outputs: Outputs, scheduler: Scheduler) -> None:
        """Sends each gateway its part of what a gang has to tell, and forgets the groups that ended."""
        for incarnation, tokens in outputs.token_messages(self.incarnation):
            self._send_gateway(gateway_identity(incarnation), tokens)
        if outputs.failures:
            for incarnation, failure in outputs.failure_messages(self.incarnation):
                self._send_gateway(gateway_identity(incarnation), failure)
        if outputs.ended:
            for group in outputs.ended:
                self.reception.gateways.forget(group.id, group)
            self.answer_pins(self.prefixes.computed(outputs.ended_prefixes, scheduler))

    def answer_pins(self, answers: list[tuple[int, Pins]]) -> None:
        """Sends answers, each with its gateway."""
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
        schedulers = self.gangs.schedulers
        if len(schedulers) > 1:
            place(self.reception.waiting, self.gangs.ready_schedulers)
        for gang in self.gangs.ready:
            while gang.ready and len(gang.sent) < self.options.pipeline_depth:
                if not self._send_plan(gang):
                    break
        for scheduler in schedulers:
            if not scheduler.outputs.is_empty:
                self.publish(scheduler.take_outputs(), scheduler)
        self._pumped_at = time.monotonic()

    def _send_plan(self, gang: Gang) -> bool:
        scheduler = gang.scheduler
        assert scheduler is not None
        started = time.monotonic()
        plan = scheduler.schedule()
        if plan is None:
            return False
        scheduled = time.monotonic()
        frame = plan.pack()
        packed = time.monotonic()
        self.metrics.phase["schedule"].observe(scheduled - started)
        self.metrics.phase["pack"].observe(packed - scheduled)
        gang.sent.append(Sent(packed, self._limit_of(plan, scheduler)))
        for rank in list(gang.ranks.values()):
            try:
                self.workers.send(rank.data, frame)
            except Unreachable as error:
                self.gangs.lose(gang, [rank], f"it does not take plans: {error}")
                return False
        return True

    def _limit_of(self, plan: Plan, scheduler: Scheduler) -> float:
        """Seconds after which the plan counts as hung: ten times what its prompts are going to take."""
        speed = scheduler.speeds.prefill
        if not len(plan.chunk_lengths) or not speed:
            return self.options.plan_timeout
        return max(self.options.plan_timeout, 10 * int(plan.chunk_lengths.sum()) / speed)

    def tick(self) -> None:
        """Looks for the dead: after draining, since the judge itself may have slept."""
        self.workers.drain()
        self.clients.drain()
        for gateway in self.reception.gateways.silent():
            log.warning("gateway %x is silent: its requests are freed", gateway.incarnation)
            self.reception.drop_gateway(gateway)
        self.gangs.judge()
        self._pump()
        schedulers = self.gangs.schedulers
        self.metrics.look_at(schedulers, self.reception.waiting)
        idle = [scheduler for scheduler in schedulers if scheduler.is_idle]
        for scheduler in idle:
            scheduler.check()
        self._trimmer.look(len(idle) == len(schedulers) and not self.reception.waiting)

    def _refuse_frame(self, socket: str, error: ProtocolError) -> None:
        self.refused[socket] += 1
        self._limited.warning(socket, "a frame on the %s port was refused: %s", socket, error)

    def info(self) -> Info:
        """The state that operators see. Called from the probe thread too: reads only."""
        schedulers = self.gangs.schedulers
        return Info(
            query=0,
            controlplane=self.incarnation,
            ready=self.is_ready,
            waiting=self.gangs.num_waiting,
            preempted=sum(len(scheduler.preempted) for scheduler in schedulers),
            running=sum(len(scheduler.running) for scheduler in schedulers),
            gangs=[gang.state() for gang in self.gangs if gang.ranks],
        )


def _check_identity(actual: bytes, expected: bytes) -> None:
    if actual != expected:
        raise ProtocolError("incarnation: not that of the sender's routing id")
