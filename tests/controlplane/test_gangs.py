"""Gangs of one or several ranks: they form, lose ranks, disagree and hang, and no token is lost."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from scene import Scene, ToyRank

from octavo.proto.session import ModelInfo

PROMPTS = [[(7 * i + j) % 40 for j in range(5 + i)] for i in range(6)]
DEADLY = 55  # a token that no prompt above has, and that is never drawn

MakeScene = Callable[..., Scene]


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Scene(tmp_path, free_ports(3), **options))


def gang(scene: Scene, size: int, number: int = 0) -> list[ToyRank]:
    """Workers that take their seats in order."""
    ranks = [scene.rank(tensor_parallel=size, gang=number, rank=rank) for rank in range(size)]
    scene.ready(*ranks)
    return ranks


def start(scene: Scene, max_tokens: int = 20) -> list[int]:
    """Requests whose first tokens have come."""
    numbers = [scene.gateway.submit(prompt, max_tokens) for prompt in PROMPTS]
    scene.until(lambda: all(scene.gateway.heard[number].tokens for number in numbers))
    return numbers


def check(scene: Scene, numbers: list[int]) -> None:
    scene.finish(*numbers)
    for number in numbers:
        scene.gateway.check(number)
    scene.until_idle()


# -- several ranks -------------------------------------------------------------------------------------


def test_three_ranks_get_the_same_plans_and_give_one_answer(scene: MakeScene) -> None:
    one = scene(tensor_parallel=3)
    ranks = gang(one, 3)
    assert [rank.reset.rank for rank in ranks if rank.reset] == [0, 1, 2]
    assert {rank.reset.gang_size for rank in ranks if rank.reset} == {3}
    check(one, start(one))
    assert len({rank.plans for rank in ranks}) == 1


def test_seats_are_given_out_before_weights_are_read(scene: MakeScene) -> None:
    one = scene(tensor_parallel=2)
    ranks = [one.rank(register=False, tensor_parallel=2) for _ in range(3)]
    for rank in ranks:
        rank.say_join()
        one.until(lambda rank=rank: rank.seat is not None)
    assert [(r.seat.gang, r.seat.rank) for r in ranks if r.seat] == [(0, 0), (0, 1), (1, 0)]
    for rank in ranks[:2]:
        assert not one.is_ready
        rank.say_register()
    one.ready(*ranks[:2])


def test_the_rendezvous_is_that_of_rank_0(scene: MakeScene) -> None:
    one = scene(tensor_parallel=2)
    second = one.rank(tensor_parallel=2, rank=1, rendezvous="host-b:2")
    first = one.rank(tensor_parallel=2, rank=0, rendezvous="host-a:1")
    one.ready(first, second)
    assert first.reset is not None and second.reset is not None
    assert first.reset.rendezvous == second.reset.rendezvous == "host-a:1"


def test_the_rank_with_the_fewest_blocks_decides(scene: MakeScene) -> None:
    one = scene(tensor_parallel=2)
    ranks = [one.rank(tensor_parallel=2, num_kv_blocks=blocks) for blocks in (30, 17)]
    one.ready(*ranks)
    assert {rank.reset.num_blocks for rank in ranks if rank.reset} == {17}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_comes_back_and_the_streams_go_on(scene: MakeScene, victim: int) -> None:
    one = scene(tensor_parallel=2)
    ranks = gang(one, 2)
    numbers = start(one)
    first = ranks[victim].reset
    ranks[victim].die()
    one.until(lambda: not one.is_ready)
    back = one.rank(tensor_parallel=2)
    one.ready(back)
    assert back.reset is not None and first is not None and back.reset.epoch > first.epoch
    assert back.reset.rank == victim
    check(one, numbers)


def test_ranks_that_disagree_begin_a_new_epoch(scene: MakeScene) -> None:
    one = scene(tensor_parallel=2)
    ranks = gang(one, 2)
    numbers = start(one)
    before = ranks[0].reset
    ranks[1].lies = True
    one.until(lambda: ranks[0].reset is not before)
    ranks[1].lies = False
    check(one, numbers)
    assert "drew other tokens than rank 0" in one.log.read_text()


def test_a_rank_that_hangs_is_dropped_and_the_others_keep_their_seats(scene: MakeScene) -> None:
    one = scene(tensor_parallel=2, plan_timeout=1.0)
    ranks = gang(one, 2)
    numbers = start(one, max_tokens=30)
    ranks[1].holds = True
    one.until(lambda: not one.is_ready)
    one.until(lambda: not ranks[1].known)
    assert ranks[0].known
    ranks[1].holds = False
    ranks[1].say_register()
    check(one, numbers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel": 3}, "--tensor-parallel 3 of the worker differs from --tensor-parallel 2"),
        ({"tensor_parallel": 2, "rank": 2}, "--rank 2: a gang has the ranks 0 to 1"),
        ({"tensor_parallel": 2, "gang": 0, "rank": 1}, "rank 1 of gang 0 is taken by another worker"),
        (
            {
                "tensor_parallel": 2,
                "model": ModelInfo(name="o", family="t", digest="x", vocab_size=9, max_model_len=9),
            },
            "its model o differs from toy",
        ),
        ({"tensor_parallel": 2, "gang": 5000}, "--gang 5000: there are at most 1024 gangs"),
    ],
)
def test_who_does_not_belong_is_refused(scene: MakeScene, changes: dict[str, Any], reason: str) -> None:
    one = scene(tensor_parallel=2)
    gang(one, 2)
    for join in (True, False):
        stranger = one.rank(register=not join, **changes)
        if join:
            stranger.say_join()
        one.until(lambda stranger=stranger: stranger.refused is not None)
        assert reason in str(stranger.refused)
    check(one, start(one))


def test_a_gateway_that_was_there_before_a_worker_of_another_model_is_refused(scene: MakeScene) -> None:
    one = scene()
    waits = one.gateway.submit([1, 2], 4)
    other = ModelInfo(name="other", family="t", digest="x", vocab_size=60, max_model_len=64)
    worker = one.rank(model=other)
    one.until(lambda: one.gateway.refused is not None)
    assert "differs from the worker's (other)" in str(one.gateway.refused)
    one.until(lambda: worker.reset is not None)
    assert not one.gateway.heard[waits].tokens and worker.plans == 0


# -- several gangs -------------------------------------------------------------------------------------


def test_two_gangs_share_the_work(scene: MakeScene) -> None:
    one = scene()
    ranks = [one.rank(), one.rank()]
    one.ready(*ranks)
    assert sorted(rank.reset.gang for rank in ranks if rank.reset) == [0, 1]
    check(one, start(one))
    assert all(rank.plans > 10 for rank in ranks)
    assert len(one.info().gangs) == 2


def test_a_prompt_goes_where_its_blocks_are(scene: MakeScene) -> None:
    one = scene()
    ranks = [one.rank(num_kv_blocks=blocks) for blocks in (20, 40)]
    one.ready(*ranks)
    first = one.gateway.submit(list(range(16)), 4)
    check(one, [first])
    used = [rank.plans > 0 for rank in ranks]
    assert used == [False, True], "without hits the one with more free blocks is taken"
    # So many wait there that the other one would have more room.
    others = [one.gateway.submit([40 - i] * 30, 8) for i in range(4)]
    again = one.gateway.submit([*range(16), 1, 2], 4)
    check(one, [*others, again])
    assert one.gateway.heard[again].cached == 16


def test_a_request_goes_only_where_it_fits(scene: MakeScene) -> None:
    one = scene()
    ranks = [one.rank(num_kv_blocks=blocks) for blocks in (8, 16)]
    one.ready(*ranks)
    numbers = [one.gateway.submit([i] * 40, 12) for i in range(4)]
    check(one, numbers)
    assert ranks[0].plans == 0


def test_a_gang_that_goes_leaves_its_requests_to_the_other(scene: MakeScene) -> None:
    one = scene()
    ranks = [one.rank(), one.rank()]
    one.ready(*ranks)
    numbers = start(one, max_tokens=40)
    ranks[0].die()
    check(one, numbers)
    assert len(one.info().gangs) == 1
    third = one.rank()
    one.until(lambda: third.reset is not None)
    third_time = start(one)
    check(one, third_time)
    assert third.plans > 0


def test_an_orderly_stop_moves_the_work(scene: MakeScene) -> None:
    one = scene()
    ranks = [one.rank(), one.rank()]
    one.ready(*ranks)
    numbers = start(one, max_tokens=40)
    ranks[1].say_bye()
    one.until(lambda: len(one.info().gangs) == 1)
    ranks[1].die()
    check(one, numbers)


def test_a_request_that_fitted_only_the_gang_that_went_is_refused(scene: MakeScene) -> None:
    one = scene()
    ranks = [one.rank(num_kv_blocks=blocks) for blocks in (8, 16)]
    one.ready(*ranks)
    large = one.gateway.submit([1] * 40, 10)
    one.until(lambda: len(one.gateway.heard[large].tokens) > 0)
    ranks[1].die()
    one.finish(large)
    failure = one.gateway.heard[large].failure
    assert failure is not None and failure.code == "INVALID_ARGUMENT"
    small = one.gateway.submit([1] * 8, 10)
    check(one, [small])


# -- requests that kill workers ------------------------------------------------------------------------


def keep_alive(scene: Scene, deadly: int) -> Callable[[], bool]:
    """Starts a new worker for one that died."""

    def revive() -> bool:
        if all(rank.is_dead for rank in scene.ranks):
            scene.rank().deadly = deadly
        return False

    return revive


def test_a_request_that_kills_workers_fails_alone(scene: MakeScene) -> None:
    one = scene()
    worker = one.rank()
    worker.deadly = DEADLY
    one.ready(worker)
    numbers = start(one, max_tokens=40)
    poison = one.gateway.submit([1, 2, DEADLY, 3], 5)
    revive = keep_alive(one, DEADLY)
    one.until(lambda: revive() or one.gateway.heard[poison].ended)
    failure = one.gateway.heard[poison].failure
    assert failure is not None and failure.code == "INTERNAL" and "at last alone" in failure.reason
    one.until(lambda: revive() or all(one.gateway.heard[number].ended for number in numbers))
    check(one, numbers)
    assert len(one.ranks) <= 6, "the poison was run too often"


def test_workers_that_are_killed_from_outside_cost_nobody_a_request(scene: MakeScene) -> None:
    one = scene()
    one.ready(one.rank())
    numbers = [one.gateway.submit(prompt, 30) for prompt in PROMPTS]
    for _ in range(6):
        plans = one.ranks[-1].plans
        one.until(lambda plans=plans: one.ranks[-1].plans > plans + 2)
        one.ranks[-1].die()
        one.ready(one.rank())
    check(one, numbers)


def test_a_plan_that_fails_again_and_again_fails_only_its_request(scene: MakeScene) -> None:
    one = scene()
    worker = one.rank()
    one.ready(worker)
    bad = one.gateway.submit([9, 9, 9], 5)
    worker.holds = True

    def fail() -> bool:
        if worker.frames and worker.reset is not None:
            worker.fault("out of memory")
            worker.frames.clear()
        return one.gateway.heard[bad].ended

    one.until(fail)
    failure = one.gateway.heard[bad].failure
    assert failure is not None and failure.code == "INTERNAL"
    worker.holds = False
    check(one, start(one))
