"""A gang: the worker ranks that run one plan together."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from octavo.controlplane.scheduler import Scheduler
from octavo.proto.plan import Result
from octavo.proto.session import (
    GangState,
    ModelInfo,
    Register,
    Reset,
    control_identity,
    data_identity,
)


class RanksDisagree(Exception):  # noqa: N818 (an event that callers handle, not a fault)
    """The ranks of a gang drew different tokens for one plan."""


@dataclass(eq=False)
class Rank:
    """A worker that has a seat in a gang."""

    incarnation: int
    number: int
    model: ModelInfo
    register: Register | None = None  # None while it loads its weights
    epoch: int = 0  # of the last reset that it has done
    last_seen: float = field(default_factory=time.monotonic)
    answers: deque[Result] = field(default_factory=deque)  # results that other ranks still owe

    @cached_property
    def control(self) -> bytes:
        return control_identity(self.incarnation)

    @cached_property
    def data(self) -> bytes:
        return data_identity(self.incarnation)


class Sent(NamedTuple):
    """A plan in flight."""

    at: float  # monotonic seconds
    limit: float  # seconds that it may take


@dataclass(eq=False)
class Gang:
    """One gang; its scheduler outlives its ranks."""

    number: int
    size: int
    epoch: int = 0  # goes up with every change; no two gangs ever have the same
    ranks: dict[int, Rank] = field(default_factory=dict)  # by rank number
    formed_at: float | None = (
        None  # monotonic seconds of the resets of this epoch; None: a seat is free
    )
    ready: bool = False  # all ranks have acknowledged the reset of this epoch
    scheduler: Scheduler | None = None
    sent: deque[Sent] = field(default_factory=deque)  # plans in flight, oldest first
    faults: int = 0  # plans that failed, in a row
    retry_at: float | None = None  # monotonic seconds when a gang that keeps failing forms again

    @property
    def is_complete(self) -> bool:
        """Whether every seat has a worker that has loaded its model."""
        return len(self.registers) == self.size

    @property
    def registers(self) -> Sequence[Register]:
        """Of the workers that have loaded, in the order of their ranks."""
        ranks = (self.ranks[number] for number in sorted(self.ranks))
        return [rank.register for rank in ranks if rank.register is not None]

    def is_late(self, now: float, limit: float) -> bool:
        """Whether a rank has not acknowledged its reset in time."""
        return self.formed_at is not None and not self.ready and now - self.formed_at > limit

    def end_epoch(self) -> None:
        """No plan of this epoch counts any more."""
        self.ready, self.formed_at = False, None
        self.sent.clear()
        for rank in self.ranks.values():
            rank.answers.clear()

    def take_answer(self, rank: Rank, result: Result) -> Result | None:
        """Keeps a rank's result. Returns that of rank 0 once all ranks have answered the plan.

        Raises:
            RanksDisagree: they drew different tokens, or answered different plans.
        """
        if self.size == 1:
            return result
        rank.answers.append(result)
        if len(rank.answers) > len(self.sent):
            raise RanksDisagree(f"rank {rank.number} answers a plan that was not sent")
        if not all(other.answers for other in self.ranks.values()):
            return None
        answers = {n: other.answers.popleft() for n, other in self.ranks.items()}
        first = answers[0]
        for number, answer in answers.items():
            if (answer.number, answer.digest) != (first.number, first.digest):
                raise RanksDisagree(
                    f"rank {number} drew other tokens than rank 0 in plan {first.number}"
                )
        return first

    def reset_message(self, controlplane: int, rank: Rank) -> Reset:
        """What tells a rank to forget everything and join this epoch."""
        assert self.scheduler is not None
        shape, host = self.scheduler.shape, self.ranks[0].register
        return Reset(
            controlplane=controlplane,
            epoch=self.epoch,
            gang=self.number,
            rank=rank.number,
            gang_size=self.size,
            rendezvous=host.rendezvous if host is not None and self.size > 1 else "",
            block_size=shape.block_size,
            num_slots=shape.num_slots,
            max_batched_tokens=shape.max_batched_tokens,
            max_model_len=shape.max_model_len,
            num_blocks=shape.num_blocks,
            num_cpu_blocks=shape.num_cpu_blocks,
        )

    def state(self) -> GangState:
        """For operators."""
        first = self.registers[0] if self.registers else None
        state = GangState(
            gang=self.number,
            size=self.size,
            epoch=self.epoch,
            ready=self.ready,
            device=first.device if first else "",
            engine=first.engine if first else "",
        )
        if self.scheduler is not None:
            state.block_size = self.scheduler.shape.block_size
            state.device_pool = self.scheduler.blocks.device.state()
            state.swap_pool = self.scheduler.blocks.swap.state()
            state.plans = self.scheduler.next_number
            state.running = len(self.scheduler.running)
        return state
