"""All gangs: who sits where, when a gang forms, and what happens when it loses a rank.

Workers take seats as they come: the first free rank of the first gang that has one, or the one that
they claim. A gang whose seats are all taken by loaded workers forms: a new epoch, a reset to every
rank. Whatever changes a gang ends its epoch, and its groups wait to be recomputed on any gang.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Protocol

from octavo.controlplane.capacity import RankRefused, shape_of, speeds_of
from octavo.controlplane.counters import Counters
from octavo.controlplane.draft import Shape
from octavo.controlplane.gang import Gang, Rank, RanksDisagree
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.pins import PrefixRegistry
from octavo.controlplane.placement import take_back
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import OrderedGroups, SequenceGroup
from octavo.controlplane.suspects import count_loss
from octavo.proto.plan import Fault, Result
from octavo.proto.session import (
    BeatAnswer,
    Join,
    ModelInfo,
    Pins,
    Ready,
    Refused,
    Register,
    Seat,
    WorkerBeat,
    WorkerBye,
    control_identity,
)
from octavo.proto.wire import Message

log = logging.getLogger("octavo.controlplane")

MAX_GANGS = 1024
_LONGEST_PAUSE = 10.0  # seconds before a gang that keeps failing forms again


class Surroundings(Protocol):
    """What the gangs need of the process around them."""

    incarnation: int

    def send_worker(self, identity: bytes, message: Message) -> bool:
        """False where the worker is not connected."""

    def publish(self, outputs: Outputs, scheduler: Scheduler) -> None:
        """Tells the gateways."""

    def answer_pins(self, answers: list[tuple[int, Pins]]) -> None:
        """Tells the gateways that wait for prefixes."""

    def gangs_changed(self) -> None:
        """Whether and what can be served may have changed."""


class Gangs:
    """Owns gangs and seats. The one queue of waiting groups belongs to the reception."""

    def __init__(
        self,
        options: ControlPlaneOptions,
        counters: Counters,
        waiting: OrderedGroups,
        prefixes: PrefixRegistry,
        around: Surroundings,
    ) -> None:
        self._options, self._counters = options, counters
        self._waiting, self._prefixes, self._around = waiting, prefixes, around
        self._gangs: dict[int, Gang] = {}
        self._seats: dict[int, tuple[Gang, Rank]] = {}  # by the worker's incarnation
        # Epochs of a later control plane must be larger than ours, whenever it starts.
        self._epochs = itertools.count(time.time_ns() // 1_000_000)

    # -- what is there -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Gang]:
        return iter(list(self._gangs.values()))

    @property
    def ready(self) -> list[Gang]:
        """Gangs that take plans."""
        return [gang for gang in self._gangs.values() if gang.ready]

    @property
    def ready_schedulers(self) -> list[Scheduler]:
        return [gang.scheduler for gang in self.ready if gang.scheduler is not None]

    @property
    def schedulers(self) -> list[Scheduler]:
        """Of gangs that have formed at some time, those without ranks included."""
        return [gang.scheduler for gang in self._gangs.values() if gang.scheduler is not None]

    @property
    def roomiest(self) -> Scheduler | None:
        """Of the gang with most blocks: what does not fit there fits nowhere."""
        formed = [gang.scheduler for gang in self._gangs.values() if gang.formed_at is not None]
        there = [scheduler for scheduler in formed if scheduler is not None] or self.schedulers
        return max(there, key=lambda scheduler: scheduler.shape.num_blocks, default=None)

    @property
    def model(self) -> ModelInfo | None:
        """What the workers serve; None while there is none."""
        return next((rank.model for _, rank in self._seats.values()), None)

    def scheduler_of(self, group: SequenceGroup) -> Scheduler | None:
        """The scheduler that has a group; None for one that waits for any gang."""
        gang = self._gangs.get(group.gang) if group.gang is not None else None
        return gang.scheduler if gang is not None else None

    @property
    def num_waiting(self) -> int:
        """Groups that wait, for any gang or for one."""
        others = (s.waiting for s in self.schedulers if s.waiting is not self._waiting)
        return len(self._waiting) + sum(map(len, others))

    # -- what workers say ----------------------------------------------------------------------------

    def on_join(self, join: Join) -> None:
        try:
            gang, rank = self._seat(join)
        except RankRefused as refusal:
            self._refuse(join.incarnation, str(refusal))
            return
        rank.last_seen = time.monotonic()
        seat = Seat(controlplane=self._around.incarnation, gang=gang.number, rank=rank.number)
        self._around.send_worker(rank.control, seat)

    def on_register(self, register: Register) -> None:
        try:
            gang, rank = self._seat(register)
        except RankRefused as refusal:
            self._refuse(register.incarnation, str(refusal))
            return
        was_loaded, rank.register = rank.register is not None, register
        rank.last_seen = time.monotonic()
        if not was_loaded:
            self._log_registration(gang, rank)
        if gang.is_complete:
            self._form(gang, newest=rank)
        else:
            self._answer_beat(rank.incarnation, known=True)

    def on_ready(self, ready: Ready) -> None:
        gang, rank = self._seats.get(ready.incarnation, (None, None))
        if gang is None or rank is None or ready.epoch != gang.epoch or gang.ready:
            return
        rank.epoch = ready.epoch
        if gang.formed_at is not None and all(r.epoch == gang.epoch for r in gang.ranks.values()):
            gang.ready = True
            log.info("gang %d is ready", gang.number)
            self._around.gangs_changed()

    def on_beat(self, beat: WorkerBeat) -> None:
        seat = self._seats.get(beat.incarnation)
        if seat is not None:
            seat[1].last_seen = time.monotonic()
        self._answer_beat(beat.incarnation, known=seat is not None)

    def on_bye(self, bye: WorkerBye) -> None:
        seat = self._seats.get(bye.incarnation)
        if seat is not None:
            gang, rank = seat
            self.lose(gang, [rank], "a worker stops in order", orderly=True)

    def take_result(self, identity: bytes, result: Result) -> tuple[Gang, Result] | None:
        """A plan's result with its gang, once all ranks have answered; None: nothing to do yet."""
        seat = self._by_data(identity)
        if seat is None or not seat[0].ready or result.epoch != seat[0].epoch:
            return None
        gang, rank = seat
        try:
            whole = gang.take_answer(rank, result)
        except RanksDisagree as error:
            self._counters.disagreements += 1
            log.error("gang %d: %s; a new epoch begins", gang.number, error)
            self._form(gang)
            return None
        return None if whole is None else (gang, whole)

    def on_fault(self, identity: bytes, fault: Fault) -> None:
        seat = self._by_data(identity)
        if seat is None or fault.epoch != seat[0].epoch:
            return
        gang, rank = seat
        log.error(
            "plan %d failed on rank %d of gang %d: %s",
            fault.number, rank.number, gang.number, fault.reason,
        )  # fmt: skip
        self._end_epoch(gang, orderly=False)
        gang.faults += 1
        if gang.faults > 1:  # not in a hot loop
            gang.retry_at = time.monotonic() + min(0.1 * 2**gang.faults, _LONGEST_PAUSE)
            self._settle()
        else:
            self._form(gang)

    # -- seats ---------------------------------------------------------------------------------------

    def _seat(self, claim: Join | Register) -> tuple[Gang, Rank]:
        """The seat of a worker, a new one if it has none. Raises RankRefused."""
        self._check_size(claim)
        seat = self._seats.get(claim.incarnation)
        if seat is not None:
            return seat
        self._drop_unreachable()
        model = self.model
        if model is not None and model.digest != claim.model.digest:
            raise RankRefused(
                f"its model {claim.model.name} differs from {model.name}, which the other workers "
                "serve: start all with the same --model"
            )
        gang, number = self._free_seat(claim)
        rank = Rank(claim.incarnation, number, claim.model)
        gang.ranks[number] = rank
        self._gangs[gang.number] = gang
        self._seats[claim.incarnation] = gang, rank
        return gang, rank

    def _check_size(self, claim: Join | Register) -> None:
        size = self._options.tensor_parallel
        if claim.tensor_parallel != size:
            raise RankRefused(
                f"--tensor-parallel {claim.tensor_parallel} of the worker differs from "
                f"--tensor-parallel {size} of the control plane"
            )
        if claim.rank is not None and not 0 <= claim.rank < size:
            raise RankRefused(
                f"--rank {claim.rank}: a gang has the ranks 0 to {size - 1} (--tensor-parallel {size})"
            )

    def _free_seat(self, claim: Join | Register) -> tuple[Gang, int]:
        size = self._options.tensor_parallel
        numbers = [*sorted(self._gangs), self._unused()] if claim.gang is None else [claim.gang]
        for number in numbers:
            if not 0 <= number < MAX_GANGS:
                raise RankRefused(f"--gang {number}: there are at most {MAX_GANGS} gangs")
            gang = self._gangs.get(number) or Gang(number, size)
            for rank in range(size) if claim.rank is None else [claim.rank]:
                if rank not in gang.ranks:
                    return gang, rank
        taken = "every rank" if claim.rank is None else f"rank {claim.rank}"
        raise RankRefused(
            f"{taken} of gang {claim.gang} is taken by another worker: stop that one, or "
            "start this one without --gang"
        )

    def _unused(self) -> int:
        return next(number for number in itertools.count() if number not in self._gangs)

    def _drop_unreachable(self) -> None:
        for gang in list(self._gangs.values()):
            if gone := self._unreachable(gang):
                self.lose(gang, gone, "its connection is closed")

    def _unreachable(self, gang: Gang) -> list[Rank]:
        return [rank for rank in gang.ranks.values() if not self._reaches(rank)]

    def _reaches(self, rank: Rank) -> bool:
        answer = BeatAnswer(controlplane=self._around.incarnation, known=True)
        return self._around.send_worker(rank.control, answer)

    def _by_data(self, identity: bytes) -> tuple[Gang, Rank] | None:
        """The seat of the sender of a result: its routing id names the incarnation."""
        if identity[:1] != b"d":
            return None
        try:
            return self._seats.get(int(identity[1:], 16))
        except ValueError:
            return None

    # -- epochs --------------------------------------------------------------------------------------

    def _form(self, gang: Gang, newest: Rank | None = None) -> None:
        """A new epoch with the ranks that there are. One that does not go with the rest is refused."""
        try:
            shape = shape_of(
                gang.registers, self._options, next(self._epochs), self._others_block_size(gang)
            )
        except RankRefused as refusal:
            refused = list(gang.ranks.values()) if newest is None else [newest]
            self.lose(gang, refused, "it is refused", orderly=True)
            for rank in refused:
                self._refuse(rank.incarnation, str(refusal))
            return
        self._end_epoch(gang, orderly=True)
        self._begin_epoch(gang, shape)
        self._settle()

    def _others_block_size(self, gang: Gang) -> int | None:
        """A group may run on any gang, so all have blocks of one size."""
        others = [other for other in self._gangs.values() if other is not gang]
        formed = [other.scheduler for other in others if other.formed_at is not None]
        return next((s.shape.block_size for s in formed if s is not None), None)

    def _begin_epoch(self, gang: Gang, shape: Shape) -> None:
        speeds = speeds_of(gang.registers, shape.block_size)
        if gang.scheduler is None:
            gang.scheduler = Scheduler(shape, OrderedGroups(), self._counters, speeds, gang.number)
        else:
            gang.scheduler.begin(shape, speeds)
        gang.epoch, gang.formed_at, gang.retry_at = shape.epoch, time.monotonic(), None
        self._around.answer_pins(self._prefixes.recompute(gang.scheduler))
        for rank in gang.ranks.values():
            reset = gang.reset_message(self._around.incarnation, rank)
            self._around.send_worker(rank.control, reset)
        log.info(
            "gang %d forms: %d blocks of %d tokens", gang.number, shape.num_blocks, shape.block_size
        )

    def lose(self, gang: Gang, ranks: list[Rank], why: str, orderly: bool = False) -> None:
        """These ranks are gone; what the gang held is to be recomputed."""
        level = logging.INFO if orderly else logging.WARNING
        names = ", ".join(str(rank.number) for rank in ranks)
        log.log(level, "gang %d loses rank %s: %s", gang.number, names, why)
        self._end_epoch(gang, orderly)
        for rank in ranks:
            del gang.ranks[rank.number], self._seats[rank.incarnation]
            self._counters.lost_workers += not orderly
        self._settle()

    def _end_epoch(self, gang: Gang, orderly: bool) -> None:
        scheduler = gang.scheduler
        if scheduler is not None and gang.formed_at is not None:
            cause = None if orderly else count_loss(scheduler)
            if scheduler.waiting is not self._waiting:
                take_back(scheduler, self._waiting)
            for group in scheduler.evacuate():
                if group is not cause:
                    self._waiting.add(group)
            self._prefixes.leave(gang.number)
            if cause is not None:
                self._fail(cause, scheduler)
            self._around.publish(scheduler.take_outputs(), scheduler)
        gang.epoch = next(self._epochs)
        gang.end_epoch()

    def _fail(self, group: SequenceGroup, scheduler: Scheduler) -> None:
        """This group alone was in the plans that were lost, again."""
        reason = (
            f"the worker was lost {group.losses + 1} times while it ran this request, at last alone"
        )
        log.error("request %d of gateway %x fails: %s", group.id.request, group.id.gateway, reason)
        self._counters.failed_suspects += 1
        if group.prefix is None:
            scheduler.fail(group, "INTERNAL", reason)
        else:
            others = [other for other in self.schedulers if other is not scheduler]
            answers = self._prefixes.give_up(group.prefix, "INTERNAL", reason, others)
            self._around.answer_pins(answers)

    def _settle(self) -> None:
        """After any change: forgets gangs that are gone, divides the queue, checks what waits."""
        for number, gang in list(self._gangs.items()):
            if not gang.ranks and len(self._gangs) > 1:
                del self._gangs[number]
        self._divide_queue()
        roomiest = self.roomiest
        if roomiest is not None and any(gang.formed_at is not None for gang in self._gangs.values()):
            roomiest.refit(self._waiting)
            self._around.publish(roomiest.take_outputs(), roomiest)
        self._around.gangs_changed()

    def _divide_queue(self) -> None:
        """A gang that is alone reads the one queue itself; of several each gets its part of it."""
        schedulers = self.schedulers
        for scheduler in schedulers:
            if scheduler.waiting is not self._waiting:
                take_back(scheduler, self._waiting)
            scheduler.waiting = self._waiting if len(schedulers) == 1 else OrderedGroups()

    # -- judging -------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Looks for ranks that are dead or hang, and for gangs whose pause is over."""
        now, limits = time.monotonic(), self._options
        for gang in list(self._gangs.values()):
            silent = [r for r in gang.ranks.values() if now - r.last_seen > limits.heartbeat_timeout]
            if silent:
                self.lose(gang, silent, f"no heartbeat for {limits.heartbeat_timeout:g} s")
            elif gone := self._unreachable(gang):
                self.lose(gang, gone, "its connection is closed")
            elif gang.sent and now - gang.sent[0].at > gang.sent[0].limit:
                hung = [rank for rank in gang.ranks.values() if not rank.answers]
                self.lose(gang, hung, f"a plan is unanswered for {gang.sent[0].limit:g} s")
            elif gang.is_late(now, limits.plan_timeout):
                late = [rank for rank in gang.ranks.values() if rank.epoch != gang.epoch]
                why = f"a reset is not acknowledged for {limits.plan_timeout:g} s"
                self.lose(gang, late, why, orderly=True)
            elif gang.retry_at is not None and now >= gang.retry_at and gang.is_complete:
                self._form(gang)

    # -- answers -------------------------------------------------------------------------------------

    def _answer_beat(self, incarnation: int, known: bool) -> None:
        answer = BeatAnswer(controlplane=self._around.incarnation, known=known)
        self._around.send_worker(control_identity(incarnation), answer)

    def _refuse(self, incarnation: int, reason: str) -> None:
        log.error("worker %x refused: %s", incarnation, reason)
        self._around.send_worker(control_identity(incarnation), Refused(reason=reason))

    def _log_registration(self, gang: Gang, rank: Rank) -> None:
        register = rank.register
        assert register is not None
        log.info(
            "worker %x registered as rank %d of gang %d: %s engine on %s, %.1f MB of weights, "
            "%d bytes of KV cache per token",
            rank.incarnation,
            rank.number,
            gang.number,
            register.engine,
            register.device,
            register.weight_bytes / 1e6,
            register.token_bytes,
        )
