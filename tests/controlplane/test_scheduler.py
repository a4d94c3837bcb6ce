"""The scheduler against a worker that notices every wrong block."""

import os
import random

import pytest
from driver import Driver, shape, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.proto.plan import Result, Sampling
from octavo.proto.session import SampleState, Submit
from octavo.proto.wire import ProtocolError, int32s


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + index * 7) % 50 for index in range(length)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 20])
def test_one_request(length: int, depth: int) -> None:
    driver = Driver(shape(), depth)
    request = submit(1, prompt(length), max_tokens=9)
    assert driver.add(request) is None
    driver.run()
    driver.check_answer(request)
    driver.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_many_requests_in_one_batch(depth: int) -> None:
    driver = Driver(shape(num_blocks=100, num_slots=16, max_batched_tokens=16), depth)
    requests = [submit(i, prompt(1 + 3 * i % 17, i), max_tokens=1 + i % 7) for i in range(1, 30)]
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()
    assert driver.counters.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [3, 4, 6, 8])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_samples_share_their_prompt_and_diverge(n: int, length: int, depth: int) -> None:
    driver = Driver(shape(num_blocks=40), depth)
    request = submit(1, prompt(length), max_tokens=10, n=n)
    driver.add(request)
    driver.run()
    driver.check_answer(request)
    driver.check_idle()
    assert driver.counters.prefill_tokens == length


def test_samples_take_the_blocks_that_sharing_allows() -> None:
    driver = Driver(shape(num_blocks=40, prefill_chunk=16), depth=1)
    driver.add(submit(1, prompt(6), max_tokens=8, n=3))
    used = []
    while driver.step():
        used.append(driver.scheduler.blocks.device.total - driver.scheduler.blocks.free_blocks)
    # After g tokens, g >= 2: floor(p/B) + n * (ceil((p+g-1)/B) - floor(p/B)); ceil(p/B) for g = 1.
    assert used[:7] == [2] + [1 + 3 * (-(-(6 + g - 1) // 4) - 1) for g in range(2, 8)]


def test_stops_and_limits() -> None:
    driver = Driver(shape(num_blocks=100))
    requests = [
        submit(1, prompt(5), 30, sampling=Sampling(seed=3, eos_token_ids=int32s([11]))),
        submit(2, prompt(5), 30, sampling=Sampling(seed=3, eos_token_ids=int32s(range(20)))),
        submit(3, prompt(5), 30, n=3, sampling=Sampling(seed=4, stop_token_ids=int32s(range(9)))),
        submit(
            4, prompt(5), 9, sampling=Sampling(seed=4, eos_token_ids=int32s(range(50)), ignore_eos=True)
        ),
        submit(5, prompt(5), 1),
    ]
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()


def test_no_output_wanted_only_scores_of_the_prompt() -> None:
    driver = Driver(shape())
    request = submit(1, prompt(20), max_tokens=0, sampling=Sampling(prompt_logprobs=0))
    driver.add(request)
    driver.run()
    assert driver.told[1].tokens == {}
    assert driver.told[1].scores == [-float(token) for token in prompt(20)[1:]]
    assert driver.told[1].finishes[0].reason == "length"
    driver.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_pressure_recomputes_and_loses_nothing(depth: int) -> None:
    driver = Driver(shape(num_blocks=10), depth)
    requests = [submit(i, prompt(5, i), max_tokens=16, n=1 + i % 2) for i in range(1, 7)]
    for request in requests:
        driver.add(request)
    driver.run()
    assert driver.counters.preemptions >= 3
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_preempted_at_every_step_and_twice_in_a_row(every: int) -> None:
    driver = Driver(shape(num_blocks=30), depth=1)
    request = submit(1, prompt(9), max_tokens=12, n=3, sampling=Sampling(seed=5, prompt_logprobs=0))
    driver.add(request)
    for step in range(4000):
        if not driver.step():
            break
        if step % (8 * every) < 2 * every and driver.scheduler.running:
            driver.scheduler._preempt(driver.groups[1])
            driver.scheduler.check()
    driver.check_answer(request)
    assert driver.told[1].scores == [-float(token) for token in prompt(9)[1:]]
    driver.check_idle()


def test_a_lost_worker_is_a_preemption() -> None:
    driver = Driver(shape(num_blocks=30))
    requests = [submit(i, prompt(3 + i, i), max_tokens=15, n=1 + i % 3) for i in range(1, 6)]
    for request in requests:
        driver.add(request)
    for epoch in range(2, 12):
        for _ in range(3):
            driver.step()
        driver.reset(shape(num_blocks=30, epoch=epoch))
    driver.run()
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()


def test_what_can_never_fit_is_refused_and_harms_nobody() -> None:
    driver = Driver(shape(num_blocks=8, max_model_len=64))
    assert "32 tokens" in (driver.add(submit(1, prompt(40), 1)) or "")
    assert "n: 9" in (driver.add(submit(2, prompt(4), 1, n=9)) or "")
    wall = submit(3, prompt(28), 20)
    crowd = submit(4, prompt(8), 20, n=8)
    good = submit(5, prompt(6), 12)
    for request in (wall, crowd, good):
        assert driver.add(request) is None
    driver.run()
    driver.check_answer(wall, end=33)  # 32 tokens have KV, the last needs none
    driver.check_answer(crowd, end=9)
    driver.check_answer(good)
    driver.check_idle()


def test_cancel_frees_within_two_plans() -> None:
    for samples in (None, {0}, {1}, {2}):
        for after in range(12):
            driver = Driver(shape(num_blocks=30))
            request = submit(1, prompt(9), max_tokens=12, n=3)
            other = submit(2, prompt(3), max_tokens=12)
            driver.add(request)
            driver.add(other)
            for _ in range(after):
                driver.step()
            driver.cancel(1, samples)
            driver.scheduler.check()
            driver.cancel(1, samples)
            driver.run()
            driver.check_answer(other)
            driver.check_idle()
            assert driver.counters.max_cancel_to_free_plans <= 2
            for sample in {0, 1, 2} - (samples or {0, 1, 2}):
                assert len(driver.told[1].tokens[sample]) == 12


def test_cancel_of_an_idle_service_waits_for_no_plan() -> None:
    driver = Driver(shape(), depth=1)
    driver.add(submit(1, prompt(9), max_tokens=12))
    driver.step()
    driver.step()
    driver.cancel(1)
    assert driver.scheduler.blocks.free_blocks == 12
    driver.run()
    driver.check_idle()
    assert driver.counters.max_cancel_to_free_plans == 0


def test_a_new_attempt_goes_on_where_the_old_one_was() -> None:
    whole = Driver(shape(num_blocks=30))
    request = submit(1, prompt(9), max_tokens=12, n=2)
    whole.add(request)
    whole.run()
    told = whole.told[1].tokens
    states = [SampleState(tokens=int32s(told[0][:5])), SampleState(tokens=int32s(told[1][:3]))]
    again = Driver(shape(num_blocks=30))
    resumed = submit(1, prompt(9), max_tokens=12, samples=states)
    again.add(resumed)
    again.run()
    again.check_answer(resumed)
    again.check_idle()


def test_order_is_first_come_first_served_within_a_priority() -> None:
    driver = Driver(shape(num_blocks=100, num_slots=1), depth=1)
    for number, priority in ((1, 0), (2, 1), (3, 0), (4, -1), (5, 0)):
        driver.add(submit(number, prompt(3, number), 2, priority=priority))
    finished: list[int] = []
    while driver.step():
        finished += [r for r in driver.told if driver.told[r].finishes and r not in finished]
    assert finished == [4, 1, 3, 5, 2]


def test_results_out_of_order_are_refused() -> None:
    driver = Driver(shape())
    driver.add(submit(1, prompt(3), 8))
    assert driver.scheduler.schedule() is not None
    with pytest.raises(ProtocolError, match="oldest plan"):
        driver.scheduler.process(Result(epoch=1, number=1, rank=0))
    with pytest.raises(ProtocolError, match="0 for 1 draws"):
        driver.scheduler.process(Result(epoch=1, number=0, rank=0))


def _random_request(number: int, chance: random.Random) -> Submit:
    stops = int32s(chance.sample(range(50), chance.choice([0, 0, 1, 3])))
    scores = chance.choice([None, None, 0])
    sampling = Sampling(seed=chance.randrange(1000), stop_token_ids=stops, prompt_logprobs=scores)
    max_tokens = chance.randint(0 if scores is not None else 1, 20)
    length = chance.randint(1, 24)
    return submit(
        number,
        prompt(length, number),
        max_tokens,
        n=chance.choice([1, 1, 1, 2, 3]),
        sampling=sampling,
        priority=chance.choice([0, 0, 0, 1]),
    )


@settings(max_examples=int(os.environ.get("OCTAVO_EXAMPLES", "60")), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([1, 2]), blocks=st.integers(6, 30))
def test_random_traffic(seed: int, depth: int, blocks: int) -> None:
    """Arrivals, cancels and lost workers at random: every answer is that of an undisturbed run."""
    chance = random.Random(seed)
    driver = Driver(shape(num_blocks=blocks, prefill_chunk=chance.choice([1, 5, 16])), depth)
    requests: dict[int, Submit] = {}
    ends: dict[int, int] = {}
    cancelled: set[int] = set()
    for number in range(1, 25):
        request = _random_request(number, chance)
        if driver.add(request) is None:
            requests[number], ends[number] = request, driver.groups[number].end
        for _ in range(chance.randint(0, 6)):
            driver.step()
        if chance.random() < 0.15 and requests:
            victim = chance.choice(list(requests))
            driver.cancel(victim, chance.choice([None, {0}]))
            cancelled.add(victim)
        if chance.random() < 0.05:
            driver.reset(shape(num_blocks=blocks, epoch=driver.scheduler.shape.epoch + 1))
    driver.run()
    for number in requests.keys() - cancelled:
        driver.check_answer(requests[number], ends[number])
    driver.check_idle()
    assert driver.counters.max_cancel_to_free_plans <= depth
