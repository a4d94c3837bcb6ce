"""Registered prefixes: computed once, pinned until unregistered, computed again in a new epoch."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import (
    NO_OUTPUTS,
    Key,
    OrderedGroups,
    RequestId,
    Sequence,
    SequenceGroup,
)
from octavo.proto.plan import Sampling
from octavo.proto.session import Pin, Pins, PinState
from octavo.proto.wire import Int32s

MAX_PREFIXES = 4096
_NO_GATEWAY = 0  # an incarnation that no gateway has: nobody is told of the prefix's rows


@dataclass
class _Place:
    """A prefix on one gang."""

    group: SequenceGroup | None  # computes it
    blocks: int = 0  # pinned now


@dataclass
class _Prefix:
    """One registered prefix."""

    name: str
    tokens: Int32s  # as registered
    salt: str
    full: int = 0  # tokens in its full blocks
    losses: int = 0  # as those of a group
    places: dict[int, _Place] = field(default_factory=dict)  # by gang
    asking: list[tuple[int, int]] = field(default_factory=list)  # (gateway, query) to be answered

    @property
    def blocks(self) -> int:
        """Pinned on the gang that has most of it."""
        return max((place.blocks for place in self.places.values()), default=0)

    @property
    def state(self) -> PinState:
        return PinState(name=self.name, tokens=self.full, blocks=self.blocks)


class PrefixRefused(Exception):  # noqa: N818 (an answer to the client)
    """A prefix that is not taken: a gRPC status code and a text naming field and limit."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class PrefixRegistry:
    """Owns the names; each gang computes and pins every prefix, and its scheduler owns the blocks."""

    def __init__(self, waiting: OrderedGroups, max_pinned: float) -> None:
        """
        Args:
            waiting: groups that wait for any gang.
        """
        self._waiting, self._max_pinned = waiting, max_pinned
        self._prefixes: dict[str, _Prefix] = {}
        self._serial = -1  # descending: they have no arrival that a client could compare with

    def register(self, pin: Pin, schedulers: list[Scheduler]) -> Pins | None:
        """Starts to compute a prefix on these gangs. Returns the answer if there is one already.

        Raises:
            PrefixRefused: it is too short, too many, too large, or another one has its name.
        """
        known = self._prefixes.get(pin.name)
        if known is not None:
            if known.salt != pin.cache_salt or known.tokens.tolist() != pin.tokens.tolist():
                raise PrefixRefused("ALREADY_EXISTS", f"name: {pin.name!r} has other tokens already")
            if known.blocks:
                return Pins(query=pin.query, pins=[known.state])
            known.asking.append((pin.gateway, pin.query))
            return None
        for scheduler in schedulers:
            self._check(pin, scheduler)
        prefix = _Prefix(pin.name, pin.tokens, pin.cache_salt, asking=[(pin.gateway, pin.query)])
        self._prefixes[pin.name] = prefix
        for scheduler in schedulers:
            self._compute(prefix, scheduler)
        return None

    def _check(self, pin: Pin, scheduler: Scheduler) -> None:
        size, total = scheduler.shape.block_size, scheduler.shape.num_blocks
        blocks = len(pin.tokens) // size
        if not pin.name:
            raise PrefixRefused("INVALID_ARGUMENT", "name: empty")
        if scheduler.blocks.index is None:
            raise PrefixRefused("FAILED_PRECONDITION", "prefix reuse is off: --prefix-caching")
        if not blocks:
            reason = f"prompt: {len(pin.tokens)} tokens are less than a block of {size}"
            raise PrefixRefused("INVALID_ARGUMENT", reason)
        if len(pin.tokens) > scheduler.shape.max_model_len:
            reason = f"prompt: more than {scheduler.shape.max_model_len} tokens"
            raise PrefixRefused("INVALID_ARGUMENT", reason)
        if len(self._prefixes) >= MAX_PREFIXES:
            raise PrefixRefused("RESOURCE_EXHAUSTED", f"{MAX_PREFIXES} prefixes are registered")
        pinned = self._reserved(size) + blocks
        most = int(self._max_pinned * total)
        if pinned > most:
            raise PrefixRefused(
                "RESOURCE_EXHAUSTED", f"{pinned} blocks would be pinned, --max-pinned allows {most}"
            )
        if scheduler.largest_need(self._waiting) > total - pinned:
            reason = "an accepted request would have no room beside it; retry when it has ended"
            raise PrefixRefused("FAILED_PRECONDITION", reason)

    def _reserved(self, size: int) -> int:
        return sum(len(prefix.tokens) // size for prefix in self._prefixes.values())

    def _compute(self, prefix: _Prefix, scheduler: Scheduler) -> None:
        size = scheduler.shape.block_size
        prefix.full = len(prefix.tokens) // size * size
        group = SequenceGroup(
            id=RequestId(_NO_GATEWAY, 0),
            attempt=0,
            key=Key(0, time.time(), self._serial),
            prompt=prefix.tokens[: prefix.full],
            max_tokens=0,
            sampling=Sampling(),
            cache_salt=prefix.salt,
            prefix=prefix.name,
            losses=prefix.losses,
        )
        self._serial -= 1
        group.sequences.append(Sequence(group, 0, NO_OUTPUTS))
        group.started = True
        scheduler.reserved[prefix.name] = (prefix.salt, prefix.tokens)
        reason = scheduler.fit(group)  # in a new epoch the pool may be smaller
        if reason is not None:
            del scheduler.reserved[prefix.name]
            raise PrefixRefused("INVALID_ARGUMENT", reason)
        prefix.places[scheduler.number] = _Place(group)
        scheduler.compute_prefix(group)

    def computed(self, groups: Iterable[SequenceGroup], scheduler: Scheduler) -> list[tuple[int, Pins]]:
        """The answers, with the gateways that wait for them, now that these groups have ended."""
        answers = []
        for group in groups:
            prefix = self._prefixes.get(group.prefix or "")
            place = prefix.places.get(scheduler.number) if prefix is not None else None
            if prefix is None or place is None or place.group is not group:
                continue
            place.group = None
            found = scheduler.blocks.find_prefix(group.path, len(group.prompt))
            if len(found) * scheduler.shape.block_size < len(group.prompt):
                self._compute(prefix, scheduler)  # a part was evicted meanwhile
                continue
            scheduler.blocks.pin(prefix.name, found)
            place.blocks = len(found)
            answers += self._answers(prefix, pins=[prefix.state])
        return answers

    def _answers(self, prefix: _Prefix, **answer: Any) -> list[tuple[int, Pins]]:
        asking, prefix.asking = prefix.asking, []
        return [(gateway, Pins(query=query, **answer)) for gateway, query in asking]

    def unregister(self, name: str, schedulers: Iterable[Scheduler]) -> list[tuple[int, Pins]]:
        """Gives a prefix up.

        Returns:
            Answers, with the gateways that still waited for it.

        Raises:
            PrefixRefused: there is none of that name.
        """
        if name not in self._prefixes:
            raise PrefixRefused("NOT_FOUND", f"name: no prefix {name!r} is registered")
        return self.give_up(name, "NOT_FOUND", "name: unregistered meanwhile", schedulers)

    def give_up(
        self, name: str, code: str, reason: str, schedulers: Iterable[Scheduler]
    ) -> list[tuple[int, Pins]]:
        """Forgets a prefix and frees what these gangs hold of it. Returns as `unregister` does."""
        prefix = self._prefixes.pop(name)
        for scheduler in schedulers:
            scheduler.reserved.pop(name, None)
            place = prefix.places.get(scheduler.number)
            if place is not None and place.group is not None:
                scheduler.cancel(place.group, set())
            elif place is not None and place.blocks:
                scheduler.blocks.unpin(name)
        return self._answers(prefix, code=code, reason=reason)

    def leave(self, number: int) -> None:
        """A gang's epoch has ended: it holds nothing any more."""
        for prefix in self._prefixes.values():
            place = prefix.places.pop(number, None)
            if place is not None and place.group is not None:
                prefix.losses = max(prefix.losses, place.group.losses)

    def recompute(self, scheduler: Scheduler) -> list[tuple[int, Pins]]:
        """A gang's new epoch has nothing in its pools: every prefix is computed again.

        Returns:
            Answers, with the gateways that waited for prefixes that fit nowhere any more.
        """
        answers = []
        scheduler.reserved.clear()
        for prefix in list(self._prefixes.values()):
            try:
                self._compute(prefix, scheduler)
            except PrefixRefused as refusal:
                if not prefix.places:
                    answers += self.give_up(prefix.name, refusal.code, refusal.reason, [])
        return answers

    def states(self) -> list[PinState]:
        """All registered prefixes."""
        return [prefix.state for prefix in self._prefixes.values()]
