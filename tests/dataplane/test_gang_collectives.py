"""Collectives over gloo between threads of one process: what they give, and how they end."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from controlplane_side import reset_message

from octavo.dataplane.models.shard import Shard
from octavo.dataplane.parallel import gang as gang_module
from octavo.dataplane.parallel.collectives import (
    CollectiveError,
    GangCollectives,
    Interruption,
    first_line,
)
from octavo.dataplane.parallel.gang import Gang

T = TypeVar("T")
SIZE = 3


class Ranks:
    """The ranks of a gang, each with a thread of its own."""

    def __init__(self) -> None:
        self.stopping = False
        self.interruptions = [Interruption(lambda: self.stopping) for _ in range(SIZE)]
        self.gangs = [
            Gang(0, GangCollectives(Shard(rank, SIZE), interruption), "127.0.0.1", "cpu")
            for rank, interruption in enumerate(self.interruptions)
        ]
        self._pools = [ThreadPoolExecutor(1) for _ in range(SIZE)]

    def start(self, rank: int, call: Callable[[Gang], T]) -> "Future[T]":
        return self._pools[rank].submit(call, self.gangs[rank])

    def run(self, call: Callable[[Gang], T]) -> list[T]:
        """What the call gives on each rank."""
        return [future.result(60) for future in [self.start(rank, call) for rank in range(SIZE)]]

    def join(self, gang: Gang, epoch: int, interrupted: Callable[[], bool] = lambda: False) -> bool:
        reset = reset_message(
            1, epoch, rank=gang.shard.rank, gang_size=SIZE, rendezvous=self.gangs[0].address
        )
        gang.leave()
        return gang.join(reset, interrupted)

    def meet(self, epoch: int) -> None:
        assert all(self.run(lambda gang: self.join(gang, epoch)))

    def close(self) -> None:
        """Dropped by their ranks, groups close their connections, which ends what still waits."""
        for pool, gang in zip(self._pools, self.gangs, strict=True):
            pool.submit(gang.leave).result(60)
            pool.shutdown()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("count", [5, 20_000])
def test_sums_are_the_same_on_every_rank(ranks: Ranks, count: int) -> None:
    """Of few numbers, which every rank adds by itself, and of many, which go around."""
    ranks.meet(1)
    sums = ranks.run(lambda gang: gang.collectives.all_reduce(numbers(gang.shard.rank, count)))
    wanted = sum(numbers(rank, count) for rank in range(SIZE))
    assert float((sums[0] - wanted).abs().max()) < 1e-5
    assert all(torch.equal(sums[0], other) for other in sums[1:])


def test_parts_of_unequal_sizes_are_gathered(ranks: Ranks) -> None:
    ranks.meet(1)
    sizes = [3, 2, 2]
    parts = [torch.full((4, size), float(rank)) for rank, size in enumerate(sizes)]
    wholes = ranks.run(lambda gang: gang.collectives.all_gather(parts[gang.shard.rank], sizes))
    assert all(torch.equal(whole, torch.cat(parts, dim=1)) for whole in wholes)


def test_a_rank_that_leaves_is_an_error_of_the_others_and_a_new_epoch_works(ranks: Ranks) -> None:
    ranks.meet(1)
    ranks.start(2, lambda gang: gang.leave()).result(60)
    others = [ranks.start(n, lambda g: g.collectives.all_reduce(torch.ones(4))) for n in (0, 1)]
    for rank, future in enumerate(others):
        with pytest.raises(CollectiveError, match=f"rank {rank} of 3, epoch 1: all-gather: "):
            future.result(60)
    ranks.meet(2)
    sums = ranks.run(lambda gang: gang.collectives.all_reduce(torch.ones(4)))
    assert [part.tolist() for part in sums] == [[3.0] * 4] * 3


@pytest.mark.parametrize("over", [False, True])
def test_a_newer_epoch_ends_the_wait_for_a_silent_rank(ranks: Ranks, over: bool) -> None:
    ranks.meet(1)
    waiting = ranks.start(0, lambda gang: gang.collectives.all_reduce(torch.ones(4)))
    ranks.interruptions[0](1)  # of its own epoch: nothing changes
    with pytest.raises(TimeoutError):
        waiting.result(0.6)
    ranks.interruptions[0](None if over else 2)
    with pytest.raises(CollectiveError, match="a newer epoch begins, and a rank does not answer"):
        waiting.result(60)
    with pytest.raises(CollectiveError, match="a newer epoch begins"):
        ranks.start(0, lambda gang: gang.collectives.all_reduce(torch.ones(4))).result(60)


def test_a_stop_signal_ends_the_wait_for_a_silent_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.dataplane.parallel.collectives._STOP_SECONDS", 0.1)
    ranks.meet(1)
    waiting = ranks.start(0, lambda gang: gang.collectives.all_reduce(torch.ones(4)))
    ranks.stopping = True
    with pytest.raises(CollectiveError, match="this worker is to stop"):
        waiting.result(60)


def test_a_meeting_is_bounded_and_can_be_left(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()
    waiting = ranks.start(0, lambda gang: ranks.join(gang, 1, left.is_set))
    left.set()
    assert waiting.result(60) is False
    monkeypatch.setattr(gang_module, "MEET_SECONDS", 0.3)
    with pytest.raises(CollectiveError, match=r"rank 1 of 3, epoch 2: meeting at 127\.0\.0\.1:\d+: "):
        ranks.start(1, lambda gang: ranks.join(gang, 2)).result(60)
    monkeypatch.undo()
    ranks.meet(3)


def test_without_a_group_nothing_is_sent() -> None:
    alone = GangCollectives(Shard(1, 3), Interruption())
    part = torch.ones(2, 2)
    assert alone.all_reduce(part) is part
    assert alone.all_gather(part, [3, 2, 2]).shape == (2, 7)


def test_errors_of_torch_are_told_without_places_in_its_source() -> None:
    error = RuntimeError("[/pytorch/gloo/pair.cc:553] Connection closed by peer [::1]:7.\nmore")
    assert first_line(error) == "Connection closed by peer [::1]:7."
    assert first_line(RuntimeError("")) == ""
