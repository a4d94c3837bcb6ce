"""What the ranks of a gang compute together, over a process group of torch."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from octavo.dataplane.models.shard import Shard

# How long one collective may take: far above the time by which one rank computes longer than another.
TIMEOUT = timedelta(seconds=120)
_SLICE = timedelta(seconds=0.25)  # of waiting, after which interruptions are looked for
_STOP_SECONDS = 10.0  # for which a stop signal lets a collective go on
# Numbers up to which every rank sends all to all and adds: two ranks over loopback, 0.4 ms against
# 1.9 for gloo's own sum of 576 numbers, and 0.4 against 2.1 of 9,216.
_FEW = 1 << 16


class Group(Protocol):
    """What is used of a process group of torch, gloo's or NCCL's."""

    def name(self) -> str: ...
    def abort(self) -> None: ...
    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...


class CollectiveError(Exception):
    """The ranks could not compute together. The text says which and why."""


class Interruption:
    """How other threads get the one that computes out of a collective."""

    def __init__(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """
        Args:
            stopping: whether the process shall end.
        """
        self.stopping = stopping
        self._wanted: int | None = None  # the epoch that another thread wants to go on with
        self._over = False  # no epoch will follow
        self._device_group: tuple[Group, int] | None = None
        # Groups given up while a peer was silent: freeing one would wait for that peer.
        self._given_up: list[tuple[object, dist.Work]] = []

    def __call__(self, epoch: int | None) -> None:
        """Ends the collectives of any other epoch with an error; None: of all. For any thread."""
        self._wanted, self._over = epoch, epoch is None
        if self._device_group is not None and self.concerns(self._device_group[1]):
            self._device_group[0].abort()

    def concerns(self, epoch: int) -> bool:
        """Whether collectives of this epoch are to end."""
        return self._over or (self._wanted is not None and self._wanted != epoch)

    def watch(self, group: Group | None, epoch: int) -> None:
        """The group in use, which must be aborted if it waits on a device."""
        waits = group is not None and _waits_on_device(group)
        self._device_group = (group, epoch) if group is not None and waits else None

    def give_up(self, group: Group, work: dist.Work) -> None:
        """Keeps a group with a silent peer until its work has ended."""
        self._given_up = [pair for pair in self._given_up if not pair[1].is_completed()]
        self._given_up.append((group, work))


class GangCollectives:
    """Implements `octavo.dataplane.models.shard.Collectives` in the group of the current epoch.

    Before a gang has met it does nothing: what is computed then is measured, never used.
    """

    def __init__(self, shard: Shard, interruption: Interruption) -> None:
        self.shard = shard
        self._interruption = interruption
        self._group: Group | None = None
        self._epoch = 0  # of the group

    def enter(self, group: Group, epoch: int) -> None:
        """From now on collectives take place in `group`."""
        self._group, self._epoch = group, epoch
        self._interruption.watch(group, epoch)

    def leave(self) -> None:
        """Drops the group."""
        self._group = None
        self._interruption.watch(None, 0)

    def all_reduce(self, part: Tensor) -> Tensor:
        if self._group is None:
            return part
        if part.numel() <= _FEW and part.device.type == "cpu":
            return torch.stack(self._gathered(part)).sum(dim=0)
        part = part.contiguous()
        self._run("all-reduce", lambda group: group.allreduce([part]))
        return part

    def all_gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        # Parts of one size, as the backends want them.
        padded = F.pad(part, (0, max(sizes) - part.shape[1]))
        parts = [padded] * len(sizes) if self._group is None else self._gathered(padded)
        return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)

    def _gathered(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.shard.size)]
        self._run("all-gather", lambda group: group.allgather([parts], [part]))
        return parts

    def _run(self, what: str, start: Callable[[Group], dist.Work]) -> None:
        """Raises CollectiveError."""
        group = self._group
        assert group is not None
        if self._interruption.concerns(self._epoch):
            raise self._error(what, "a newer epoch begins")
        try:
            work = start(group)
            if _waits_on_device(group):
                work.wait()  # hands it to the device's queue
            else:
                self._wait(what, group, work)
        except RuntimeError as error:
            raise self._error(what, first_line(error)) from error

    def _wait(self, what: str, group: Group, work: dist.Work) -> None:
        """Waits, in slices: gloo cannot be told to stop waiting for a peer that says nothing."""
        begin = time.monotonic()
        while not _done(work):
            stuck = self._interruption.stopping() and time.monotonic() - begin > _STOP_SECONDS
            if stuck or self._interruption.concerns(self._epoch):
                self._interruption.give_up(group, work)
                reason = "this worker is to stop" if stuck else "a newer epoch begins"
                raise self._error(what, f"{reason}, and a rank does not answer")

    def _error(self, what: str, reason: str) -> CollectiveError:
        place = f"rank {self.shard.rank} of {self.shard.size}, epoch {self._epoch}"
        return CollectiveError(f"{place}: {what}: {reason}")


def first_line(error: Exception) -> str:
    """What an error of torch says, without the place in torch's source that it may begin with."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).split("\n")[0]


def _waits_on_device(group: Group) -> bool:
    return group.name() != "gloo"


def _done(work: dist.Work) -> bool:
    """Waits for a slice. Raises RuntimeError when the work has failed."""
    try:
        work.wait(_SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # it ended while the slice did: this says how
    return True
