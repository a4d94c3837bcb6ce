"""Log lines: time, process, level, text. Prompts and answers never appear in them unless asked for."""

import logging
import math
import sys
import time


def set_up_logging(process: str, level: str = "info") -> None:
    """Sends this process's log to standard error, each line marked with the process's name."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d {process:<12} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


class OneLineASecond(logging.Filter):
    """For a library's logger whose lines strangers can cause: lets one through each second."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -math.inf  # monotonic seconds

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.levelno > logging.WARNING or now - self._last >= 1.0:
            self._last = now
            return True
        return False


class LimitedLog:
    """A log for lines that strangers can cause: of each kind one every `interval` seconds.

    The next line of a kind says how many were left out. Used by one thread.
    """

    def __init__(self, log: logging.Logger, interval: float = 1.0) -> None:
        self._log, self._interval = log, interval
        self._last: dict[str, float] = {}  # monotonic seconds of a kind's last line
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, text: str, *arguments: object) -> None:
        """`kind` is one of few: names that the program gives, never what a stranger sent."""
        now = time.monotonic()
        if now - self._last.get(kind, -self._interval) < self._interval:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last[kind] = now
        count = self._left_out.pop(kind, 0)
        more = f" ({count} more like it since the last line)" if count else ""
        self._log.warning(text + "%s", *arguments, more)
