"""Histograms that cost the loop one append: what was observed is sorted into buckets later."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Durations:
    """The seconds of one thing that happens again and again. Any thread may call any method."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the buckets, ascending."""
        self._bounds = bounds
        self._new: deque[float] = deque()
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()
        # An iteration observes six times with cold caches: a call into Python would cost each time.
        self.observe: Callable[[float], None] = self._new.append

    def fold(self) -> None:
        """Sorts in what was observed; without it memory would grow until somebody reads."""
        with self._lock:
            seconds = [self._new.popleft() for _ in range(len(self._new))]
            buckets = np.searchsorted(self._bounds, seconds)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._sum += sum(seconds)

    def totals(self) -> tuple[list[tuple[str, float]], float]:
        """(upper end, how many were at most that) of each bucket, and the sum of all."""
        self.fold()
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        with self._lock:
            return list(zip(ends, np.cumsum(self._counts).tolist(), strict=True)), self._sum


class DurationsCollector(Collector):
    """One metric for the registry: durations by the value of a label, or of the one value ""."""

    def __init__(
        self, name: str, text: str, durations: Mapping[str, Durations], label: str = ""
    ) -> None:
        self._name, self._text, self._durations, self._label = name, text, durations, label

    def collect(self) -> Iterable[HistogramMetricFamily]:
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        for value, durations in self._durations.items():
            buckets, total = durations.totals()
            family.add_metric([value] if labels else [], buckets, total)
        yield family
