"""Speaks the control plane's side of a gateway's session, one message at a time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from octavo.proto.plan import DrawLogprobs
from octavo.proto.session import (
    Cancel,
    Finish,
    Finishes,
    GatewayBeat,
    Hello,
    InfoQuery,
    Pin,
    PinsQuery,
    Submit,
    Tokens,
    Unpin,
    Welcome,
)
from octavo.proto.wire import Message, float32s, int32s, unpack

M = TypeVar("M", bound=Message)
WAIT = 20.0  # seconds; nothing here takes long unless it is broken


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.005)


class Driver:
    """Speaks the control plane's side, one message at a time."""

    def __init__(self, context: zmq.asyncio.Context, port: int = 0, incarnation: int = 7) -> None:
        self.incarnation = incarnation
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)  # a full queue would drop messages without a word
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        endpoint: Any = self.socket.get(zmq.LAST_ENDPOINT)
        self.address = str(endpoint.decode())
        self.gateway = b""

    async def expect(self, kind: type[M]) -> M:
        """The next message of this kind; beats and hellos before it are skipped."""
        while True:
            identity, frame = await asyncio.wait_for(self.socket.recv_multipart(), WAIT)
            self.gateway = identity
            message: Message = unpack(
                frame, Hello, GatewayBeat, Submit, Cancel, InfoQuery, Pin, Unpin, PinsQuery
            )
            if isinstance(message, kind):
                return message
            assert isinstance(message, Hello | GatewayBeat), f"{message} came before {kind}"

    async def send(self, message: Message) -> None:
        await self.send_frame(message.pack())

    async def send_frame(self, frame: bytes) -> None:
        await self.socket.send_multipart([self.gateway, frame])

    async def welcome(self, max_model_len: int = 64) -> None:
        await self.expect(Hello)
        answer = Welcome(controlplane=self.incarnation, ready=True, max_model_len=max_model_len)
        await self.send(answer)

    async def tokens(
        self,
        submit: Submit,
        sample: int,
        offset: int,
        values: list[int],
        logprobs: Sequence[float] = (),
    ) -> None:
        """`logprobs`: of each of the tokens, or none."""
        count = len(values)
        scores = DrawLogprobs(
            draws=int32s(range(count)), logprobs=float32s(logprobs), top_counts=int32s([0] * count)
        )
        await self.send(
            Tokens(
                controlplane=self.incarnation,
                requests=int32s([submit.request] * count),
                attempts=int32s([submit.attempt] * count),
                samples=int32s([sample] * count),
                offsets=int32s(range(offset, offset + count)),
                tokens=int32s(values),
                logprobs=scores if logprobs else None,
            )
        )

    async def finish(
        self, submit: Submit, sample: int, reason: str = "length", score: float | None = None
    ) -> None:
        end = Finish(
            request=submit.request, attempt=submit.attempt, sample=sample, reason=reason, score=score
        )
        await self.send(Tokens(controlplane=self.incarnation, finishes=Finishes.of([end])))
