"""A link that is driven from the other end of a real socket, and a listener that records."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio
from plane_driver import Driver

from octavo.frontend.errors import RequestError
from octavo.frontend.link import Link
from octavo.frontend.live import LiveRequest, Score
from octavo.proto.plan import Beams, Sampling

VOCAB = 100


@dataclass
class Recorder:
    """Listens to one request."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    scores: list[Score | None] = field(default_factory=list)
    finishes: list[tuple[int, str, int | None]] = field(default_factory=list)
    hypothesis_scores: list[float | None] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)
    cached: int = 0
    error: RequestError | None = None

    def on_token(self, sample: int, token: int, score: Score | None) -> None:
        self.tokens.append((sample, token))
        self.scores.append(score)

    def on_finish(self, sample: int, reason: str, stop_token: int | None, score: float | None) -> None:
        self.finishes.append((sample, reason, stop_token))
        self.hypothesis_scores.append(score)

    def on_prompt_scores(self, scores: Sequence[Score]) -> None:
        self.prompt_scores += [score.logprob for score in scores]

    def on_started(self, cached_tokens: int) -> None:
        self.cached = cached_tokens

    def on_failure(self, error: RequestError) -> None:
        self.error = error


@dataclass
class Session:
    """A link and the control plane's side of it."""

    context: zmq.asyncio.Context
    driver: Driver
    link: Link
    run: asyncio.Future[None]

    def open(
        self, n: int = 1, beams: Beams | None = None, **sampling: Any
    ) -> tuple[Recorder, LiveRequest]:
        recorder = Recorder()
        live = LiveRequest(
            recorder,
            [1, 2, 3],
            Sampling(seed=5, **sampling),
            n,
            max_tokens=8,
            arrival=12.5,
            beams=beams,
        )
        self.link.open(live)
        return recorder, live


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[Session]:
    context = zmq.asyncio.Context()
    driver = Driver(context)
    link = Link(driver.address, "digest", VOCAB, max_live=16)
    run = asyncio.ensure_future(link.run())
    current = Session(context, driver, link, run)
    try:
        yield current
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        link.shut_down()
        current.driver.socket.close()
        context.destroy(0)


def drive(test: Callable[[Session], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with session() as current:
            await test(current)

    asyncio.run(whole())
