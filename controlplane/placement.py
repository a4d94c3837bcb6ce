"""Which gang takes which waiting group, where there are several.

One queue stays the only order. Before plans are made, the groups that have room somewhere move, first
come first served, from that queue to the gang that suits them best: the one that has their prompt's
blocks already, else the one with the most free blocks. What a gang has not admitted by then goes back
first, so nothing waits for one gang while another has room.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.controlplane.admission import plan_admission
from octavo.controlplane.fit import longest_need
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import OrderedGroups, SequenceGroup


@dataclass
class _Room:
    """What a gang could still take."""

    scheduler: Scheduler
    slots: int
    blocks: int
    is_empty: bool  # nothing runs, nothing is placed

    @classmethod
    def of(cls, scheduler: Scheduler) -> "_Room":
        # Those who come back go first, and may take all there is.
        returning = len(scheduler.preempted) > 0
        slots = 0 if returning or scheduler.keeps_alone() else scheduler.slots.num_free
        is_empty = not scheduler.running and not returning
        return cls(scheduler, slots, scheduler.blocks.available, is_empty)

    def could_ever_hold(self, group: SequenceGroup) -> bool:
        shape = self.scheduler.shape
        return longest_need(group, shape) <= shape.num_blocks - self.scheduler.blocks.num_pinned

    def take(self, group: SequenceGroup, wants: int) -> None:
        self.slots -= len(group.live)
        self.blocks -= wants
        self.is_empty = False
        group.gang = self.scheduler.number
        self.scheduler.waiting.add(group)


@dataclass(frozen=True)
class _Offer:
    """What it would take for a group to enter a gang."""

    room: _Room
    wants: int  # blocks
    found: int  # tokens of the prompt that need not be computed
    ever: bool  # whether the gang could hold it at its longest
    fits: bool  # now

    @property
    def rank(self) -> tuple[bool, bool, int, int, int]:
        """The larger the better."""
        return self.ever, self.fits, self.found, self.room.blocks, -self.room.scheduler.number


def place(waiting: OrderedGroups, schedulers: Sequence[Scheduler]) -> None:
    """Hands the first waiting groups to the gangs.

    The first one that has no room anywhere is handed to the gang with the most, because a group of a
    higher level makes others give way there; all behind it stay.
    """
    for scheduler in schedulers:
        take_back(scheduler, waiting)
    rooms = [_Room.of(scheduler) for scheduler in schedulers]
    while rooms and (group := waiting.first()) is not None:
        offer = max((_offer(group, room) for room in rooms), key=lambda offer: offer.rank)
        waiting.remove_first(1)
        offer.room.take(group, offer.wants)
        if not offer.fits:
            return


def take_back(scheduler: Scheduler, waiting: OrderedGroups) -> None:
    """Groups that the gang has not admitted wait for any gang again."""
    for group in list(scheduler.waiting):
        scheduler.waiting.remove(group)
        group.gang = None
        waiting.add(group)


def _offer(group: SequenceGroup, room: _Room) -> _Offer:
    admission = plan_admission(group, room.scheduler.blocks)
    found = len(admission.entrances[0].found) * room.scheduler.shape.block_size
    spare = (
        0 if room.is_empty else int(room.scheduler.shape.watermark * room.scheduler.shape.num_blocks)
    )
    fits = len(group.live) <= room.slots and admission.wants + spare <= room.blocks
    if group.is_suspect:
        fits = fits and room.is_empty
    return _Offer(room, admission.wants, found, room.could_ever_hold(group), fits)
