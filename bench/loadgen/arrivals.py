"""Arrival processes of an open loop: when each request is sent, whatever the server does."""

import random
from collections.abc import Sequence

KINDS = ("all", "poisson", "constant", "trace")


def all_at_once(count: int) -> list[float]:
    """Every request at second 0."""
    return [0.0] * count


def constant(count: int, rate: float) -> list[float]:
    """Evenly spaced; `rate` in requests per second."""
    return [index / rate for index in range(count)]


def poisson(count: int, rate: float, rng: random.Random) -> list[float]:
    """A Poisson process of `rate` requests per second; the first request comes at 0."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


def scaled(times: Sequence[float], rate: float) -> list[float]:
    """The times of a trace, stretched or squeezed to `rate` requests per second on average."""
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        return list(times)
    factor = (len(times) - 1) / rate / span
    return [time * factor for time in times]
