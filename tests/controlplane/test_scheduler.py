"""The scheduler against a worker that notices every wrong block."""

import dataclasses
import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
from driver import Driver, shape, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_worker import best_continuations

from octavo.controlplane.beam import candidates_for
from octavo.controlplane.draft import Shape
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import SequenceGroup
from octavo.proto.plan import Beams, Result, Sampling
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
    assert sum(driver.counters.preemptions.values()) == 0


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
        used.append(driver.scheduler.blocks.device.total - driver.scheduler.blocks.available)
    # After g tokens, g >= 2: floor(p/B) + n * (ceil((p+g-1)/B) - floor(p/B)); ceil(p/B) for g = 1.
    assert used[:7] == [2] + [1 + 3 * (-(-(6 + g - 1) // 4) - 1) for g in range(2, 8)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_samples_end_in_any_order(order: tuple[int, ...]) -> None:
    """A prompt of one and a half blocks: a copy for each sample that diverges, the last in place."""
    driver = Driver(shape(num_blocks=30, prefill_chunk=16), depth=1)
    driver.add(submit(1, prompt(6), max_tokens=20, n=3))
    for sample in order:
        driver.step()
        driver.step()
        driver.cancel(1, {sample})
        driver.scheduler.check()
    driver.run()
    assert driver.counters.copied_blocks == 2
    driver.check_idle()


def test_fork_then_abort_before_the_first_append() -> None:
    driver = Driver(shape(num_blocks=30, prefill_chunk=16), depth=1)
    driver.add(submit(1, prompt(6), max_tokens=20, n=3))
    driver.step()
    driver.cancel(1)
    driver.scheduler.check()
    driver.run()
    assert driver.counters.copied_blocks == 0
    driver.check_idle()


def test_usage_counts_tokens_and_what_sharing_saves() -> None:
    driver = Driver(shape(num_blocks=40, prefill_chunk=16), depth=1)
    driver.add(submit(1, prompt(6), max_tokens=8, n=3))
    for generated in range(1, 5):
        driver.step()
        usage = driver.scheduler.blocks.usage(driver.scheduler.slots.computed)
        if generated == 1:  # all blocks shared: the KV of six tokens in two blocks
            assert (usage.tokens, usage.physical, usage.logical) == (6, 2, 6)
            continue
        own = -(-(6 + generated - 1) // 4) - 1  # blocks of each sample beside the shared one
        assert (usage.physical, usage.logical) == (1 + 3 * own, 3 * (1 + own))
        assert usage.tokens == 4 + 3 * (6 + generated - 1 - 4)


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


def test_a_slot_forgets_how_its_last_sequence_ended() -> None:
    """One slot, used by sequences with one, several and no ending tokens in turn."""
    driver = Driver(shape(num_slots=1))
    endings: list[list[int]] = [[11], [7, 8], [], [0], list(range(20)), [], [3]]
    requests = [
        submit(i, prompt(5, i), 30, sampling=Sampling(seed=i, stop_token_ids=int32s(stops)))
        for i, stops in enumerate(endings, start=1)
    ]
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        driver.check_answer(request)


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
    assert driver.counters.preemptions["recompute"] >= 3
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
            driver.scheduler._recompute(driver.groups[1], "recompute")
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
    assert driver.scheduler.blocks.available == 12
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


def test_requests_that_waited_for_the_first_gang_are_fitted_and_served() -> None:
    gang = shape()
    early = Driver(gang)
    requests = [submit(1, prompt(5), 8), submit(2, prompt(5), 8), submit(3, prompt(49), 1)]
    groups = [SequenceGroup.from_submit(request, i) for i, request in enumerate(requests)]
    for group in groups:
        early.waiting.add(group)
        early.groups[group.id.request] = group
    early.scheduler = Scheduler(gang, early.waiting, early.counters)
    early.scheduler.refit(early.waiting)
    early.run()
    early.check_answer(requests[0])
    early.check_answer(requests[1])
    assert early.told[3].failure is not None and "leave no room" in early.told[3].failure[1]
    early.check_idle()


def test_results_out_of_order_are_refused() -> None:
    driver = Driver(shape())
    driver.add(submit(1, prompt(3), 8))
    assert driver.scheduler.schedule() is not None
    with pytest.raises(ProtocolError, match="oldest plan"):
        driver.scheduler.process(Result(epoch=1, number=1, rank=0))
    with pytest.raises(ProtocolError, match="0 for 1 draws"):
        driver.scheduler.process(Result(epoch=1, number=0, rank=0))


# -- swapping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True], ids=["no-index", "index"])
def test_pressure_swaps_and_loses_nothing(depth: int, caching: bool) -> None:
    gang = shape(num_blocks=10, num_cpu_blocks=30, preemption="swap", prefix_caching=caching)
    driver = Driver(gang, depth)
    requests = [submit(i, prompt(5, i), max_tokens=16, n=1 + i % 2) for i in range(1, 7)]
    for request in requests:
        driver.add(request)
    driver.run()
    assert driver.counters.preemptions["swap"] >= 3
    assert driver.counters.swapped_blocks["in"] <= driver.counters.swapped_blocks["out"]
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()
    if not caching:
        done = sum(len(request.prompt) for request in requests)
        recomputed = driver.counters.preemptions["recompute"]
        assert driver.counters.prefill_tokens == done or recomputed


def test_shared_blocks_are_swapped_once_and_stay_shared() -> None:
    gang = shape(num_blocks=40, num_cpu_blocks=40, preemption="swap")
    driver = Driver(gang, depth=1)
    request = submit(1, prompt(12), max_tokens=12, n=4)
    driver.add(request)
    for _ in range(5):
        driver.step()
    used = driver.scheduler.blocks.device.state().used
    assert used == 3 + 4  # three full prompt blocks together, one of their own each
    driver.force_preemption(1)
    assert driver.counters.swapped_blocks["out"] == used
    assert driver.scheduler.blocks.swap.state().used == used
    driver.step()  # back, and one token further: each sample still writes into its own block
    assert driver.scheduler.blocks.device.state().used == used
    assert driver.scheduler.blocks.swap.state().used == 0
    driver.run()
    driver.check_answer(request)
    assert driver.counters.prefill_tokens == 12


def test_a_block_that_samples_still_share_is_copied_on_write_after_a_swap() -> None:
    driver = Driver(shape(num_blocks=40, num_cpu_blocks=40, preemption="swap"), depth=1)
    request = submit(1, prompt(14), max_tokens=12, n=4)  # the last block of the prompt is half full
    driver.add(request)
    while driver.counters.prefill_tokens < 14:
        driver.step()
    driver.force_preemption(1)
    assert driver.counters.swapped_blocks["out"] == 4
    driver.run()
    driver.check_answer(request)


@pytest.mark.parametrize("cpu_blocks", [0, 1])
def test_a_full_or_absent_swap_pool_falls_back_to_recomputation(cpu_blocks: int) -> None:
    gang = shape(num_blocks=10, num_cpu_blocks=cpu_blocks, preemption="swap")
    driver = Driver(gang)
    requests = [submit(i, prompt(5, i), max_tokens=16, n=2) for i in (1, 2)]
    for request in requests:
        driver.add(request)
    driver.run()
    assert driver.counters.preemptions["recompute"] > 0 == driver.counters.preemptions["swap"]
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()


@pytest.mark.parametrize(("copy", "prefill", "kind"), [(1e6, 10.0, "swap"), (1.0, 1e6, "recompute")])
def test_auto_takes_the_cheaper_way(copy: float, prefill: float, kind: str) -> None:
    driver = Driver(shape(num_cpu_blocks=20, preemption="auto"), depth=1)
    driver.scheduler.speeds.copy, driver.scheduler.speeds.prefill = copy, prefill
    request = submit(1, prompt(9), max_tokens=12)
    driver.add(request)
    for _ in range(5):
        driver.step()
    driver.force_preemption(1)
    assert driver.counters.preemptions[kind] == 1
    driver.run()
    driver.check_answer(request)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_cancel_of_a_preempted_group_frees_both_pools(mode: str) -> None:
    driver = Driver(shape(num_cpu_blocks=20, preemption=mode), depth=1)
    driver.add(submit(1, prompt(9), max_tokens=12, n=2))
    for _ in range(5):
        driver.step()
    driver.force_preemption(1)
    driver.cancel(1, {0})
    driver.scheduler.check()
    driver.cancel(1)
    driver.scheduler.check()
    driver.run()
    driver.check_idle()
    assert driver.scheduler.blocks.swap.state().used == 0


# -- priorities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_higher_level_preempts_a_lower_one(mode: str, depth: int) -> None:
    driver = Driver(shape(num_blocks=10, num_cpu_blocks=10, preemption=mode), depth)
    low = [submit(i, prompt(8, i), max_tokens=10, priority=1) for i in (1, 2)]
    for request in low:
        driver.add(request)
    for _ in range(4):
        driver.step()
    high = submit(3, prompt(18, 3), max_tokens=4, priority=0)
    driver.add(high)
    finished: list[int] = []
    while driver.step():
        finished += [r for r in driver.told if driver.told[r].finishes and r not in finished]
    assert finished.index(3) < finished.index(2)  # the first of the lower level may have had room
    assert driver.counters.preemptions[mode] >= 1
    for request in (*low, high):
        driver.check_answer(request)
    driver.check_idle()


def test_a_higher_level_that_would_not_fit_all_the_same_preempts_nobody() -> None:
    driver = Driver(shape(num_blocks=10, num_slots=4), depth=1)
    driver.add(submit(1, prompt(12, 1), max_tokens=4, priority=0))
    driver.add(submit(2, prompt(8, 2), max_tokens=4, priority=1))
    driver.step()
    driver.add(submit(3, prompt(30, 3), max_tokens=2, priority=0))
    driver.step()
    assert sum(driver.counters.preemptions.values()) == 0
    driver.run()
    driver.check_idle()


# -- prefix reuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 8, 9, 12])
def test_a_second_identical_prompt_computes_only_what_is_new(length: int) -> None:
    driver = Driver(shape(num_blocks=30, prefix_caching=True), depth=1)
    first, second = (submit(i, prompt(length), max_tokens=6, sampling=Sampling(seed=9)) for i in (1, 2))
    for request in (first, second):
        driver.add(request)
        driver.run()
        driver.check_answer(request)
    found = (length - 1) // 4 * 4  # at least one token is computed
    assert driver.counters.prefill_tokens == 2 * length - found
    assert driver.told[2].cached == driver.counters.prefix_hit_tokens == found


def test_the_next_turn_of_a_chat_finds_what_generation_computed() -> None:
    driver = Driver(shape(num_blocks=30, prefix_caching=True, max_model_len=60), depth=2)
    first = submit(1, prompt(6), max_tokens=11)
    driver.add(first)
    driver.run()
    turn = prompt(6) + driver.told[1].tokens[0] + prompt(5, 9)
    second = submit(2, turn, max_tokens=5)
    driver.add(second)
    driver.run()
    driver.check_answer(second)
    assert driver.told[2].cached == 16  # of the 16 tokens whose KV the first turn computed


def test_salts_and_prompt_scores_keep_apart() -> None:
    driver = Driver(shape(num_blocks=30, prefix_caching=True), depth=1)
    requests = [
        submit(1, prompt(9), 2, cache_salt="a"),
        submit(2, prompt(9), 2, cache_salt="b"),
        submit(3, prompt(9), 2),
        submit(4, prompt(9), 2, sampling=Sampling(prompt_logprobs=0), cache_salt="a"),
        submit(5, prompt(9), 2, cache_salt="a"),
    ]
    for request in requests:
        driver.add(request)
        driver.run()
        driver.check_answer(request)
    assert [driver.told[i].cached for i in (1, 2, 3, 4, 5)] == [0, 0, 0, 0, 8]
    assert driver.told[4].scores == [-float(token) for token in prompt(9)[1:]]


def test_colliding_hashes_cost_hits_and_nothing_else() -> None:
    driver = Driver(shape(num_blocks=30, prefix_caching=True), depth=2)
    index = driver.scheduler.blocks.index
    assert index is not None
    index._hash = lambda parent, tokens: b"same"
    requests = [submit(i, prompt(9 + i % 5, i % 3), 6, cache_salt="ab"[i % 2]) for i in range(1, 20)]
    for request in requests:
        driver.add(request)
        for _ in range(3):
            driver.step()
    driver.run()
    for request in requests:
        driver.check_answer(request)
    driver.check_idle()


def test_cached_blocks_give_way_the_longest_unused_first() -> None:
    driver = Driver(shape(num_blocks=12, prefix_caching=True), depth=1)
    for number in (1, 2, 3):
        driver.add(submit(number, prompt(13, number), 1))
        driver.run()
    driver.add(submit(4, prompt(13, 1), 1))  # used again: now the second prompt is the oldest
    driver.run()
    driver.add(submit(5, prompt(21, 5), 1))
    driver.run()
    driver.add(submit(6, prompt(13, 1), 1))
    driver.add(submit(7, prompt(13, 2), 1))
    driver.run()
    assert driver.told[4].cached == driver.told[6].cached == 12
    assert driver.told[7].cached < 12
    driver.check_idle()


# -- beam search ------------------------------------------------------------------------------------


def search(
    number: int, length: int, width: int, max_tokens: int, stops: int = 3, **beams: Any
) -> Submit:
    sampling = Sampling(seed=number, eos_token_ids=int32s(range(stops)))
    return submit(
        number, prompt(length, number), max_tokens, n=width, sampling=sampling, beams=Beams(**beams)
    )


def exhaustive(request: Submit) -> list[tuple[float, list[int]]]:
    """The search written down as plainly as can be: lists, no slots, no blocks."""
    beams = request.beams
    assert beams is not None
    width, stops = len(request.samples), set(request.sampling.eos_token_ids.tolist())
    keep = candidates_for(width, len(stops))
    sampling = dataclasses.replace(request.sampling, candidates=keep)
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, request.max_tokens + 1):
        options = []
        for score, outputs in live:
            history = request.prompt.tolist() + outputs
            for token, logprob in best_continuations(history, sampling):
                options.append((float(np.float32(score) + np.float32(logprob)), [*outputs, token]))
        options = sorted(options, key=lambda option: -option[0])[:keep]
        full = beams.early_stopping == "true" and len(done) >= width
        ended = [o[1][-1] in stops or length == request.max_tokens for o in options]
        for option, end in list(zip(options, ended, strict=True))[:width]:
            if end and not full:
                done.append((option[0] / length**beams.length_penalty, option[1]))
        done = sorted(done, key=lambda hypothesis: -hypothesis[0])[:width]
        live = [o for o, end in zip(options, ended, strict=True) if not end][:width]
        if len(done) == width:
            reach = request.max_tokens if beams.early_stopping == "never" else length
            reach = reach if beams.length_penalty > 0 else length
            best = live[0][0] / reach**beams.length_penalty if live else -1e9
            if beams.early_stopping == "true" or best <= done[-1][0]:
                break
    return done


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beam_search(width: int, length_penalty: float, early_stopping: str) -> None:
    for stops, length in ((1, 5), (3, 8), (6, 3)):
        request = search(
            stops,
            length,
            width,
            10,
            stops,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        driver = Driver(shape(num_blocks=40), depth=2)
        driver.add(request)
        driver.run()
        told, wanted = driver.told[stops], exhaustive(request)
        assert [told.tokens[rank] for rank in range(width)] == [tokens for _, tokens in wanted]
        scores = [told.finishes[rank].score for rank in range(width)]
        assert scores == pytest.approx([score for score, _ in wanted], rel=1e-4)
        driver.check_idle()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("every", [3, 4, 5])
def test_beam_search_under_preemption(mode: str, every: int) -> None:
    wide = {"max_batched_tokens": 80, "prefill_chunk": 40}
    gang = shape(num_blocks=40, num_cpu_blocks=40, preemption=mode, **wide)
    driver = Driver(gang, depth=1)
    request = search(1, 6, 4, 10)
    driver.add(request)
    for step in range(400):
        if not driver.step():
            break
        if step % every == 0 and driver.scheduler.running:
            driver.force_preemption(1)
            driver.scheduler.check()
    driver.check_answer(request)
    assert driver.counters.preemptions[mode] >= 2
    driver.check_idle()


# -- everything at once -----------------------------------------------------------------------------


def _random_request(number: int, chance: random.Random) -> Submit:
    stops = int32s(chance.sample(range(50), chance.choice([0, 0, 1, 3])))
    scores = chance.choice([None, None, 0])
    sampling = Sampling(seed=chance.randrange(1000), stop_token_ids=stops, prompt_logprobs=scores)
    max_tokens = chance.randint(0 if scores is not None else 1, 20)
    length = chance.randint(1, 24)
    beams = (
        Beams(early_stopping=chance.choice(["true", "false", "never"]))
        if chance.random() < 0.2
        else None
    )
    return submit(
        number,
        prompt(length, chance.choice([number, 1])),
        max_tokens if beams is None else max(max_tokens, 1),
        n=chance.choice([1, 1, 1, 2, 3]),
        sampling=sampling,
        priority=chance.choice([0, 0, 0, 1]),
        cache_salt=chance.choice(["", "", "x"]),
        beams=beams,
    )


def _random_shape(chance: random.Random, blocks: int) -> Shape:
    return shape(
        num_blocks=blocks,
        num_cpu_blocks=chance.choice([0, 2, 8, 40]),
        prefill_chunk=chance.choice([1, 5, 16]),
        preemption=chance.choice(["swap", "recompute", "auto"]),
        prefix_caching=chance.choice([False, True]),
    )


@settings(max_examples=int(os.environ.get("OCTAVO_EXAMPLES", "60")), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([1, 2]), blocks=st.integers(6, 30))
def test_random_traffic(seed: int, depth: int, blocks: int) -> None:
    """Arrivals, cancels and lost workers at random: every answer is that of an undisturbed run."""
    chance = random.Random(seed)
    gang = _random_shape(chance, blocks)
    driver = Driver(gang, depth)
    driver.scheduler.speeds.copy = chance.choice([1.0, 1e6])
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
            driver.reset(dataclasses.replace(gang, epoch=driver.scheduler.shape.epoch + 1))
    driver.run()
    for number in requests.keys() - cancelled:
        driver.check_answer(requests[number], ends[number])
    driver.check_idle()
    assert driver.counters.max_cancel_to_free_plans <= depth
