import itertools
import random
import statistics
from pathlib import Path

import pytest
from loadgen import arrivals
from loadgen.lengths import InputError, Lengths
from loadgen.workload import FIRST_PLAIN_TOKEN, ArrivalSpec, LengthSource, make_requests

SYNTHETIC = LengthSource(synthetic=Lengths(7, 3))


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrivals.constant(4, rate=2.0) == [0.0, 0.5, 1.0, 1.5]


def test_all_arrive_at_once() -> None:
    assert arrivals.all_at_once(3) == [0.0, 0.0, 0.0]


def test_poisson_gaps_are_exponential_with_the_rate() -> None:
    times = arrivals.poisson(20_001, rate=4.0, rng=random.Random(5))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= 0
    # Mean and standard deviation of an exponential are both 1 / rate; 5 standard errors of slack.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=5 / 20_000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=5 * 2**0.5 / 20_000**0.5)


def test_poisson_is_a_function_of_the_seed() -> None:
    first = arrivals.poisson(10, 1.0, random.Random(3))
    assert first == arrivals.poisson(10, 1.0, random.Random(3))
    assert first != arrivals.poisson(10, 1.0, random.Random(4))


def test_a_trace_is_stretched_to_a_rate() -> None:
    assert arrivals.scaled([0.0, 1.0, 4.0], rate=1.0) == [0.0, 0.5, 2.0]
    assert arrivals.scaled([0.0, 0.0], rate=1.0) == [0.0, 0.0]


def test_requests_are_a_function_of_the_seed() -> None:
    def prompts(*seed: int) -> list[list[int]]:
        return [r.prompt for r in make_requests(SYNTHETIC, ArrivalSpec(), 5, 1000, seed)]

    assert prompts(1, 0) == prompts(1, 0)
    assert prompts(1, 0) != prompts(1, 1)
    assert prompts(1, 0) != prompts(2, 0)


def test_prompts_are_random_plain_tokens_of_the_asked_length() -> None:
    requests = make_requests(SYNTHETIC, ArrivalSpec(), 300, FIRST_PLAIN_TOKEN + 5, (0, 0))
    assert {len(request.prompt) for request in requests} == {7}
    assert {request.output_tokens for request in requests} == {3}
    used = {token for request in requests for token in request.prompt}
    assert used == set(range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 5))


def test_a_trace_gives_lengths_and_times_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,2\n3,6,1\n8,4,4\n")
    source = LengthSource(trace=str(path))
    requests = make_requests(source, ArrivalSpec("trace"), 2, 100, (0, 0))
    assert [(len(r.prompt), r.output_tokens, r.at) for r in requests] == [(5, 2, 0.0), (6, 1, 3.0)]
    faster = make_requests(source, ArrivalSpec("trace", rate=2.0), 3, 100, (0, 0))
    assert [request.at for request in faster] == [0.0, 0.375, 1.0]
    with pytest.raises(InputError, match="3 usable requests, --requests asks for 4"):
        make_requests(source, ArrivalSpec("trace"), 4, 100, (0, 0))


@pytest.mark.parametrize(
    ("arrival", "message"),
    [
        (ArrivalSpec("trace"), "--arrival trace needs --trace"),
        (ArrivalSpec("poisson"), "--arrival poisson needs --rate"),
        (ArrivalSpec("constant"), "--arrival constant needs --rate"),
    ],
)
def test_arrivals_say_what_they_lack(arrival: ArrivalSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_requests(SYNTHETIC, arrival, 2, 100, (0, 0))
