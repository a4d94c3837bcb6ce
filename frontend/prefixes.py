"""Registered prefixes: computed once by the service and kept until they are unregistered."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from octavo.frontend.errors import RequestError
from octavo.frontend.queries import Queries, no_control_plane
from octavo.proto.session import Pin, Pins, PinsQuery, PinState, Unpin
from octavo.proto.wire import Int32s, Message

log = logging.getLogger(__name__)

MAX_PREFIXES = 4096  # remembered by one gateway
PIN_TIMEOUT = 60.0  # seconds; it is computed first
TIMEOUT = 5.0  # seconds, of the other questions
_RENEWED_AT_ONCE = 16


@dataclass(frozen=True)
class Prefix:
    """What a client has registered."""

    name: str
    tokens: Int32s
    cache_salt: str = ""


class Prefixes:
    """Asks the control plane, and remembers what was registered here for the next control plane.

    Every question raises RequestError: UNAVAILABLE without a control plane, DEADLINE_EXCEEDED without
    an answer, and what the control plane itself answers.
    """

    def __init__(
        self, gateway: int, send: Callable[[Message], bool], is_joined: Callable[[], bool]
    ) -> None:
        """`gateway` is this gateway's incarnation; `send` says whether a message went out."""
        self._gateway = gateway
        self._send = send
        self._is_joined = is_joined
        self._queries = Queries[Pins]()
        self._known: dict[str, Prefix] = {}
        self._renewed_for = 0  # the control plane that has been told of all that are known
        self._renewal: asyncio.Future[None] | None = None

    async def register(self, prefix: Prefix) -> PinState:
        """Returns when the prefix is computed and pinned."""
        if prefix.name not in self._known and len(self._known) >= MAX_PREFIXES:
            raise RequestError(
                "RESOURCE_EXHAUSTED", f"the gateway has its limit of {MAX_PREFIXES} registered prefixes"
            )
        state = await self._pin(prefix)
        self._known[prefix.name] = prefix
        return state

    async def unregister(self, name: str) -> None:
        """NOT_FOUND for a name that nobody has registered."""
        try:
            await self._ask(lambda query: Unpin(gateway=self._gateway, query=query, name=name), TIMEOUT)
        except RequestError as error:
            if error.code == "NOT_FOUND":
                self._known.pop(name, None)
            raise
        self._known.pop(name, None)

    async def list(self) -> list[PinState]:
        """All of the service, whoever registered them."""
        answer = await self._ask(lambda query: PinsQuery(gateway=self._gateway, query=query), TIMEOUT)
        return answer.pins

    # -- what the link tells ----------------------------------------------------------------------

    def on_answer(self, answer: Pins) -> None:
        self._queries.answer(answer.query, answer)

    def on_ready(self, controlplane: int) -> None:
        """This control plane can serve. A new one is told of the prefixes that are known here."""
        if controlplane != self._renewed_for and self._renewal is None:
            self._renewal = asyncio.ensure_future(self._renew(controlplane))

    def on_lost(self) -> None:
        """Questions that were asked will not be answered."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        self._queries.fail()

    # -- asking -----------------------------------------------------------------------------------

    async def _renew(self, controlplane: int) -> None:
        places = asyncio.Semaphore(_RENEWED_AT_ONCE)
        await asyncio.gather(*(self._renew_one(name, places) for name in list(self._known)))
        self._renewed_for, self._renewal = controlplane, None

    async def _renew_one(self, name: str, places: asyncio.Semaphore) -> None:
        async with places:
            prefix = self._known.get(name)
            if prefix is None:  # unregistered meanwhile
                return
            try:
                await self._pin(prefix)
            except RequestError as error:
                log.error("prefix %r could not be registered again: %s", name, error)

    async def _pin(self, prefix: Prefix) -> PinState:
        answer = await self._ask(
            lambda query: Pin(
                gateway=self._gateway,
                query=query,
                name=prefix.name,
                tokens=prefix.tokens,
                cache_salt=prefix.cache_salt,
            ),
            PIN_TIMEOUT,
        )
        if len(answer.pins) != 1:
            raise RequestError("INTERNAL", "the control plane did not say what it has pinned")
        return answer.pins[0]

    async def _ask(self, make: Callable[[int], Message], timeout: float) -> Pins:
        if not self._is_joined():
            raise no_control_plane()
        try:
            answer = await self._queries.ask(lambda query: self._send(make(query)), timeout)
        except TimeoutError as error:
            raise RequestError(
                "DEADLINE_EXCEEDED", f"the control plane has not answered within {timeout:g} s"
            ) from error
        if answer.code != "OK":
            raise RequestError(answer.code, answer.reason)
        return answer
