"""Clients that ask again and again, and compare every answer with that of a quiet day."""

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from service import wait_for
from undisturbed import Case

from octavo.frontend.client import Client

STREAMS = 8


class Load:
    """STREAMS streams at once for as long as the context lasts; leaving it raises what went wrong."""

    def __init__(self, target: str, cases: list[Case]) -> None:
        self._target, self._cases = target, itertools.cycle(cases)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(STREAMS)
        self._readers: list[Future[None]] = []
        self.tokens = 0
        self.streams = 0  # that ended as they should

    def __enter__(self) -> Self:
        self._readers = [self._pool.submit(self._read) for _ in range(STREAMS)]
        self.wait_for_tokens(10 * STREAMS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown()
        if error is None:
            for reader in self._readers:
                reader.result()

    def wait_for_tokens(self, count: int) -> None:
        """Until the streams have got this many more tokens, or one has failed."""
        goal = self.tokens + count
        wait_for(lambda: self.tokens >= goal or self._has_failed(), f"{count} more tokens", 240)

    def _has_failed(self) -> bool:
        return any(reader.done() for reader in self._readers)

    def _read(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                case = next(self._cases)
            tokens = list[int]()
            # Without patience a stream that breaks is an error, not a reason to go on elsewhere.
            with Client(self._target, patience=0.0) as client:
                for delta in client.generate(case.prompt, timeout=240, **case.sampling):
                    tokens += delta.token_ids
                    with self._lock:
                        self.tokens += len(delta.token_ids)
            assert tuple(tokens) == case.tokens, f"{case}: {tokens}"
            with self._lock:
                self.streams += 1
