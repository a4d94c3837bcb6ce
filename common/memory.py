"""Memory that a process has freed, given back to the machine."""

import ctypes
import time
from collections.abc import Callable

_PAUSE = 5.0  # seconds between two times that it is given back


def _find_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; other C libraries have none and need none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


class Trimmer:
    """Gives freed memory back when its owner becomes idle after it was busy.

    The allocator keeps what was freed between blocks that are still in use: without this a process
    stays nearly as large as it was when its queue was longest.
    """

    def __init__(self) -> None:
        self._trim = _find_trim()
        self._was_busy, self._last = False, 0.0

    def look(self, is_idle: bool) -> None:
        """To be called from time to time; takes some milliseconds when there is something to do."""
        now = time.monotonic()
        if not is_idle:
            self._was_busy = True
        elif self._was_busy and self._trim is not None and now - self._last >= _PAUSE:
            self._trim(0)
            self._was_busy, self._last = False, now
