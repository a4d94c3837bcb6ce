"""The gateway's side of its session with the control plane.

One DEALER socket carries everything. The link says hello until it is welcomed, beats every second,
and keeps every live request so that a control plane that has lost it gets it again: as a new attempt
that carries what the samples have produced. Sends never wait: while there is no connection nothing is
queued in the socket, because the welcome that follows brings everything up to date.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable

import zmq

from octavo.common.curve import ClientKeys
from octavo.common.dialing import Dialer
from octavo.common.logs import LimitedLog
from octavo.common.loop_socket import Context, LoopSocket, Socket
from octavo.common.memory import Trimmer
from octavo.frontend.errors import RequestError
from octavo.frontend.inbox import deliver
from octavo.frontend.live import LiveRequest
from octavo.frontend.prefixes import Prefixes
from octavo.frontend.queries import Queries, no_control_plane
from octavo.proto.session import (
    BeatAnswer,
    Cancel,
    Failure,
    GatewayBeat,
    Hello,
    Info,
    InfoQuery,
    Pins,
    Refused,
    Tokens,
    Welcome,
    gateway_identity,
)
from octavo.proto.wire import MAX_FRAME_BYTES, Message, ProtocolError, int32s, unpack

log = logging.getLogger(__name__)

BEAT_INTERVAL = 1.0  # seconds
MAX_UNANSWERED_BEATS = 5  # after so many the control plane counts as gone
INFO_TIMEOUT = 5.0  # seconds
_WAITING_LOG_BEATS = 5


class LinkRefusedError(Exception):
    """The control plane does not want this gateway; the text says why."""


class Link:
    """Owner of the socket, of the set of live requests and of what is known of the control plane."""

    def __init__(
        self,
        address: str,
        model_digest: str,
        vocab_size: int,
        max_live: int,
        on_change: Callable[[], None] = lambda: None,
        keys: ClientKeys | None = None,
    ) -> None:
        """To be made on the running event loop.

        Args:
            address: of the control plane's gateway port, ``tcp://host:port``.
            model_digest: of the model whose tokens this gateway reads.
            vocab_size: token ids are below it.
            max_live: sizes the socket's queues.
            on_change: called whenever `ready` or the limits may have changed.
            keys: without them the session is in the clear.
        """
        self.incarnation = secrets.randbits(63)
        self.welcome: Welcome | None = None
        self.malformed = 0  # frames that were refused
        self.attempts = 0  # requests that had to be submitted again
        self._address = address
        self._digest = model_digest
        self._vocab_size = vocab_size
        self._on_change = on_change
        self._live: dict[int, LiveRequest] = {}
        self._numbers = itertools.count(1)
        self._newest = 0
        self._joined = False  # welcomed by `welcome.controlplane`, which has not gone silent since
        self._lost = False  # what it knows of our requests may be less than what we sent
        self._unanswered = 0  # beats and hellos since the last sign of life
        self._infos = Queries[Info]()
        self._trimmer = Trimmer()
        self.prefixes = Prefixes(self.incarnation, self._send, lambda: self._joined)
        self._limited = LimitedLog(log)
        self._connected = False
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = Context()
        socket = self._make_socket(max_live)
        self._dialer = Dialer(socket, address, "gateway", keys)
        self._socket = LoopSocket(socket, self._guarded(self._on_message))
        self._monitor = LoopSocket(self._dialer.monitor, self._guarded(self._on_monitor))

    def _make_socket(self, max_live: int) -> Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, gateway_identity(self.incarnation))
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.SNDHWM, 4 * max_live + 1000)
        socket.set(zmq.RCVHWM, 10_000)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    # -- what the rest of the gateway asks for -------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the control plane is there and says that it can serve."""
        return self._joined and self.welcome is not None and self.welcome.ready

    @property
    def controlplane(self) -> int:
        """Its incarnation, 0 while there was none yet."""
        return self.welcome.controlplane if self.welcome else 0

    @property
    def live_count(self) -> int:
        return len(self._live)

    def open(self, request: LiveRequest) -> None:
        """Takes a request on. It goes out now, or as soon as there is a control plane."""
        request.number = self._newest = next(self._numbers)
        self._live[request.number] = request
        if self._joined:
            self._submit(request)

    def finish_sample(self, request: LiveRequest, sample: int, reason: str) -> None:
        """The gateway itself ends a sample, for instance at a stop string."""
        if request.samples[sample].finish:
            return
        request.samples[sample].finish = reason
        if request.done:
            self.close(request)
        elif request.sent:
            self._send(self._cancel(request, [sample]))

    def close(self, request: LiveRequest) -> None:
        """Nobody wants the rest of this request. May be called at any time and again."""
        if self._live.pop(request.number, None) is not None and request.sent:
            self._send(self._cancel(request, []))

    def fail_all(self, reason: str) -> int:
        """Ends every live request with UNAVAILABLE. Returns how many there were."""
        requests = list(self._live.values())
        for request in requests:
            self.close(request)
            request.listener.on_failure(RequestError("UNAVAILABLE", reason))
        return len(requests)

    async def info(self) -> Info:
        """The state of the service. Raises RequestError UNAVAILABLE when nothing answers."""
        if not self._joined:
            raise no_control_plane()
        try:
            return await self._infos.ask(lambda query: self._send(InfoQuery(query=query)), INFO_TIMEOUT)
        except TimeoutError as error:
            raise no_control_plane() from error

    # -- the session ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the session until cancelled. Raises LinkRefusedError."""
        try:
            self._dialer.connect()
            await _first_end(self._beat(), self._fault)
        finally:
            self._socket.stop()
            self._monitor.stop()
            self._leave(lost=True)

    def shut_down(self) -> None:
        """Closes the socket; what was sent gets a second to leave."""
        self._monitor.stop()
        self._dialer.close()
        self._socket.close()
        self._context.term()

    def _guarded(self, take: Callable[[list[bytes]], None]) -> Callable[[list[bytes]], None]:
        """`take`, with the session ending by whatever it raises."""

        def guarded(parts: list[bytes]) -> None:
            try:
                take(parts)
            except Exception as error:
                if not self._fault.done():
                    self._fault.set_exception(error)

        return guarded

    def _on_monitor(self, parts: list[bytes]) -> None:
        """What was in flight when a connection broke is lost, so the session starts again."""
        event = self._dialer.take(parts)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._say_hello()
        elif event == zmq.EVENT_DISCONNECTED and self._connected:
            self._connected = False
            log.warning("the connection to the control plane at %s broke", self._address)
            self._leave(lost=True)

    def _say_hello(self) -> None:
        self._send(Hello(incarnation=self.incarnation, model_digest=self._digest))

    def _on_message(self, parts: list[bytes]) -> None:
        for frame in parts:
            try:
                self._dispatch(frame)
            except ProtocolError as error:
                self.malformed += 1
                self._limited.warning("frame", "refused a message of the control plane: %s", error)

    async def _beat(self) -> None:
        while True:
            self._judge_silence()
            self._trimmer.look(is_idle=not self._live)
            self._dialer.redial()
            if self._joined:
                self._submit_unsent()
                self._send(self._make_beat())
            else:
                self._say_hello()
            self._unanswered += 1
            await asyncio.sleep(BEAT_INTERVAL)

    def _judge_silence(self) -> None:
        """Counts own beats instead of time: a judge who slept has not sent any."""
        if self._unanswered >= MAX_UNANSWERED_BEATS and self._joined:
            log.error("the control plane at %s is silent", self._address)
            self._leave(lost=False)
        if not self._joined and self._unanswered % _WAITING_LOG_BEATS == 1:
            log.info("waiting for the control plane at %s", self._address)

    def _make_beat(self) -> GatewayBeat:
        sent = [request for request in self._live.values() if request.sent]
        return GatewayBeat(
            gateway=self.incarnation,
            newest=self._newest,
            requests=int32s([request.number for request in sent]),
            attempts=int32s([request.attempt for request in sent]),
            offsets=int32s([request.received for request in sent]),
        )

    def _dispatch(self, frame: bytes) -> None:
        message: Message = unpack(frame, Tokens, BeatAnswer, Failure, Welcome, Info, Pins, Refused)
        self._unanswered = 0
        match message:
            case Tokens():
                self._on_tokens(message)
            case BeatAnswer():
                self._on_beat_answer(message)
            case Failure():
                self._on_failure(message)
            case Welcome():
                self._on_welcome(message)
            case Info():
                self._infos.answer(message.query, message)
            case Pins():
                self.prefixes.on_answer(message)
            case Refused():
                raise LinkRefusedError(message.reason)

    def _on_tokens(self, message: Tokens) -> None:
        if message.controlplane != self.controlplane:
            return
        gaps = deliver(message, self._live, self._vocab_size)
        for finish in message.finishes:
            request = self._live.get(finish.request)
            if request and request.done:
                del self._live[finish.request]
        for request in gaps:
            if request.number in self._live:
                self._submit_again(request)

    def _on_beat_answer(self, message: BeatAnswer) -> None:
        if not message.known or message.controlplane != self.controlplane:
            self._leave(lost=True)
            self._say_hello()
            return
        missing = zip(message.missing.tolist(), message.missing_attempts.tolist(), strict=False)
        for number, attempt in missing:
            request = self._live.get(number)
            if request and request.attempt == attempt:
                self._submit_again(request)

    def _on_failure(self, message: Failure) -> None:
        request = self._live.get(message.request)
        if message.controlplane != self.controlplane or request is None:
            return
        if request.attempt == message.attempt:
            del self._live[message.request]
            request.listener.on_failure(RequestError(message.code, message.reason))

    def _on_welcome(self, message: Welcome) -> None:
        if not self._joined:
            log.info("joined control plane %x at %s", message.controlplane, self._address)
        lost = self._lost or message.controlplane != self.controlplane
        self.welcome, self._joined, self._lost = message, True, False
        if lost:
            self._fail_queries()
            for request in list(self._live.values()):
                self._submit_again(request)
        self._submit_unsent()
        if message.ready:
            self.prefixes.on_ready(message.controlplane)
        self._on_change()

    def _leave(self, lost: bool) -> None:
        """Until the next welcome there is no control plane to speak of.

        `lost`: it does not know our requests any more, so all are submitted again then.
        """
        self._joined = False
        self._lost = self._lost or lost
        if lost:
            self._fail_queries()
        self._on_change()

    def _fail_queries(self) -> None:
        self._infos.fail()
        self.prefixes.on_lost()

    # -- sending ------------------------------------------------------------------------------------

    def _submit_unsent(self) -> None:
        for request in list(self._live.values()):
            if not request.sent:
                self._submit(request)

    def _submit_again(self, request: LiveRequest) -> None:
        self.attempts += request.sent
        request.next_attempt()
        if request.done:
            self._live.pop(request.number, None)
        else:
            self._submit(request)

    def _submit(self, request: LiveRequest) -> None:
        request.sent = self._send(request.submit(self.incarnation))

    def _cancel(self, request: LiveRequest, samples: list[int]) -> Cancel:
        return Cancel(
            gateway=self.incarnation,
            request=request.number,
            attempt=request.attempt,
            samples=int32s(samples),
        )

    def _send(self, message: Message) -> bool:
        """Whether the message went out; if not, the beats set things right later."""
        try:
            self._socket.send([message.pack()])
        except zmq.Again:
            return False
        return True


async def _first_end(*awaitables: Awaitable[None]) -> None:
    """Runs all until one ends, with its error if it has one; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
