"""The requests of one run: lengths, prompts, and when each is sent."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen import arrivals
from loadgen.lengths import InputError, Lengths, read_pairs, read_trace, sample_pairs

# The first ids of the vocabularies in use here are special tokens; random prompts avoid them.
FIRST_PLAIN_TOKEN = 20


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: list[int]  # token ids
    output_tokens: int  # asked for; the end-of-sequence token is ignored
    at: float  # seconds after the start of the run


@dataclass(frozen=True)
class LengthSource:
    """Where lengths come from: exactly one of the first three is set."""

    pairs: str | None = None  # CSV file
    trace: str | None = None  # CSV file
    synthetic: Lengths | None = None
    max_total: int | None = None  # tokens of prompt and output together


@dataclass(frozen=True)
class ArrivalSpec:
    """When requests are sent. A closed loop ignores it."""

    kind: str = "all"
    rate: float | None = None  # requests per second


def make_requests(
    source: LengthSource, arrival: ArrivalSpec, count: int, vocab: int, seed: Sequence[int]
) -> list[Request]:
    """`count` requests with random prompts; the same seed gives the same requests.

    Raises:
        InputError: unusable files, or a trace that is shorter than `count`.
    """
    rng = random.Random(repr(tuple(seed)))
    lengths, trace_times = _lengths(source, count, rng)
    times = _times(arrival, count, trace_times, rng)
    tokens = np.random.default_rng(list(seed))
    return [
        Request(_random_prompt(tokens, pair.prompt, vocab), pair.output, at)
        for pair, at in zip(lengths, times, strict=True)
    ]


def _random_prompt(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    ids: list[int] = rng.integers(FIRST_PLAIN_TOKEN, vocab, length).tolist()
    return ids


def _lengths(
    source: LengthSource, count: int, rng: random.Random
) -> tuple[list[Lengths], list[float] | None]:
    """The lengths, and their arrival times where they come from a trace."""
    if source.synthetic is not None:
        return [source.synthetic] * count, None
    if source.pairs is not None:
        return sample_pairs(read_pairs(source.pairs, source.max_total), count, rng), None
    if source.trace is None:
        raise InputError("no lengths: give --lengths, --trace or --synthetic")
    trace = read_trace(source.trace, source.max_total)[:count]
    if len(trace) < count:
        raise InputError(f"{source.trace}: {len(trace)} usable requests, --requests asks for {count}")
    return [arrival.lengths for arrival in trace], [arrival.at for arrival in trace]


def _times(
    arrival: ArrivalSpec, count: int, trace_times: list[float] | None, rng: random.Random
) -> list[float]:
    if arrival.kind == "trace":
        if trace_times is None:
            raise InputError("--arrival trace needs --trace")
        return arrivals.scaled(trace_times, arrival.rate) if arrival.rate else trace_times
    if arrival.kind == "all":
        return arrivals.all_at_once(count)
    if arrival.rate is None:
        raise InputError(f"--arrival {arrival.kind} needs --rate")
    if arrival.kind == "constant":
        return arrivals.constant(count, arrival.rate)
    return arrivals.poisson(count, arrival.rate, rng)
