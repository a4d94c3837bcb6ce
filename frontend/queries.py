"""Questions to the control plane that wait for their answers."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from octavo.frontend.errors import RequestError

T = TypeVar("T")

MAX_QUERIES = 256


def no_control_plane() -> RequestError:
    return RequestError("UNAVAILABLE", "the control plane does not answer now; retry")


class Queries(Generic[T]):
    """Owner of the questions of one kind that are under way, at most `limit` at once."""

    def __init__(self, limit: int = MAX_QUERIES) -> None:
        self._limit = limit
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    async def ask(self, send: Callable[[int], bool], timeout: float) -> T:
        """Sends a question under a number of its own and returns its answer.

        Args:
            send: sends the question of that number; False if it could not.
            timeout: seconds.

        Raises:
            TimeoutError: no answer has come.
            RequestError: RESOURCE_EXHAUSTED with too many under way; UNAVAILABLE where it could not be
                sent, or whoever should answer is gone.
        """
        if len(self._waiting) >= self._limit:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"the gateway has its limit of {self._limit} questions under way; retry later",
            )
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if not send(number):
                raise no_control_plane()
            return await asyncio.wait_for(future, timeout)
        finally:
            del self._waiting[number]

    def answer(self, number: int, answer: T) -> None:
        """One whose asker is gone is dropped."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self) -> None:
        """No answer will come to any of them."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(no_control_plane())
