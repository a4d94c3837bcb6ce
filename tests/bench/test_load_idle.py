import pytest
from loadgen.idle import Idle, problems

from octavo.v1 import generation_pb2 as pb


def server(
    waiting: int = 0, running: int = 0, preempted: int = 0, free_blocks: int = 7, used_blocks: int = 0
) -> pb.GetServerInfoReply:
    pool = pb.PoolInfo(
        total_blocks=10,
        free_blocks=free_blocks,
        cached_blocks=2,
        pinned_blocks=1,
        used_blocks=used_blocks,
    )
    gang = pb.GangInfo(gang=0, device_pool=pool, swap_pool=pb.PoolInfo())
    return pb.GetServerInfoReply(gangs=[gang], waiting=waiting, running=running, preempted=preempted)


def test_free_cached_and_pinned_blocks_are_idle() -> None:
    assert problems(server()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"waiting": 1}, "waiting: 1 sequence groups"),
        ({"running": 2}, "running: 2 sequence groups"),
        ({"preempted": 3}, "preempted: 3 sequence groups"),
        ({"used_blocks": 2, "free_blocks": 5}, "gang 0 device pool: 2 blocks are still used"),
        ({"free_blocks": 6}, "gang 0 device pool: the counts do not add up to 10 blocks"),
    ],
)
def test_what_is_held_is_named(changes: dict[str, int], problem: str) -> None:
    assert problems(server(**changes)) == [problem]


def test_a_server_without_gangs_proves_nothing() -> None:
    assert problems(pb.GetServerInfoReply()) == ["no gang of workers is there, so no block was counted"]


def test_the_verdict_comes_first() -> None:
    assert Idle([], ["pool"]).text() == "at the end: idle, every block is free\npool"
    assert Idle(["running: 1 sequence groups"], []).text().startswith("at the end: NOT IDLE")
