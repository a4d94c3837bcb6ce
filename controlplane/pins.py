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
class _Prefix:
    """One registered prefix, cut to its full blocks."""

    name: str
    tokens: Int32s  # as registered
    salt: str
    blocks: int = 0  # pinned now
    group: SequenceGroup | None = None  # computes it
    asking: list[tuple[int, int]] = field(default_factory=list)  # (gateway, query) to be answered


class PrefixRefused(Exception):  # noqa: N818 (an answer to the client)
    """A prefix that is not taken: a gRPC status code and a text naming field and limit."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class PrefixRegistry:
    """Owns the names; the scheduler owns the blocks."""

    def __init__(self, waiting: OrderedGroups, max_pinned: float) -> None:
        self._waiting, self._max_pinned = waiting, max_pinned
        self._prefixes: dict[str, _Prefix] = {}
        self._serial = -1  # descending: they have no arrival that a client could compare with

    def register(self, pin: Pin, scheduler: Scheduler) -> Pins | None:
        """Starts to compute a prefix. Returns the answer if there is one already.

        Raises:
            PrefixRefused: it is too short, too many, too large, or another one has its name.
        """
        known = self._prefixes.get(pin.name)
        if known is not None:
            if known.salt != pin.cache_salt or known.tokens.tolist() != pin.tokens.tolist():
                raise PrefixRefused("ALREADY_EXISTS", f"name: {pin.name!r} has other tokens already")
            if known.blocks:
                return Pins(query=pin.query, pins=[self._state(known, scheduler)])
            known.asking.append((pin.gateway, pin.query))
            return None
        self._check(pin, scheduler)
        prefix = _Prefix(pin.name, pin.tokens, pin.cache_salt, asking=[(pin.gateway, pin.query)])
        self._prefixes[pin.name] = prefix
        scheduler.reserved[pin.name] = (prefix.salt, prefix.tokens)
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
        if scheduler.largest_need() > total - pinned:
            reason = "an accepted request would have no room beside it; retry when it has ended"
            raise PrefixRefused("FAILED_PRECONDITION", reason)

    def _reserved(self, size: int) -> int:
        return sum(len(prefix.tokens) // size for prefix in self._prefixes.values())

    def _compute(self, prefix: _Prefix, scheduler: Scheduler) -> None:
        size = scheduler.shape.block_size
        group = SequenceGroup(
            id=RequestId(_NO_GATEWAY, 0),
            attempt=0,
            key=Key(0, time.time(), self._serial),
            prompt=prefix.tokens[: len(prefix.tokens) // size * size],
            max_tokens=0,
            sampling=Sampling(),
            cache_salt=prefix.salt,
            prefix=prefix.name,
        )
        self._serial -= 1
        group.sequences.append(Sequence(group, 0, NO_OUTPUTS))
        group.started = True
        reason = scheduler.fit(group)  # in a new epoch the pool may be smaller
        if reason is not None:
            raise PrefixRefused("INVALID_ARGUMENT", reason)
        prefix.group = group
        self._waiting.add(group)

    def computed(self, groups: Iterable[SequenceGroup], scheduler: Scheduler) -> list[tuple[int, Pins]]:
        """The answers, with the gateways that wait for them, now that these groups have ended."""
        answers = []
        for group in groups:
            prefix = self._prefixes.get(group.prefix or "")
            if prefix is None or prefix.group is not group:
                continue
            prefix.group = None
            found = scheduler.blocks.find_prefix(group.path, len(group.prompt))
            if len(found) * scheduler.shape.block_size < len(group.prompt):
                self._compute(prefix, scheduler)  # a part was evicted meanwhile
                continue
            scheduler.blocks.pin(prefix.name, found)
            prefix.blocks = len(found)
            answers += self._answers(prefix, pins=[self._state(prefix, scheduler)])
        return answers

    def _answers(self, prefix: _Prefix, **answer: Any) -> list[tuple[int, Pins]]:
        asking, prefix.asking = prefix.asking, []
        return [(gateway, Pins(query=query, **answer)) for gateway, query in asking]

    def unregister(self, name: str, scheduler: Scheduler | None) -> list[tuple[int, Pins]]:
        """Gives a prefix up.

        Returns:
            Answers, with the gateways that still waited for it.

        Raises:
            PrefixRefused: there is none of that name.
        """
        prefix = self._prefixes.pop(name, None)
        if prefix is None:
            raise PrefixRefused("NOT_FOUND", f"name: no prefix {name!r} is registered")
        if scheduler is not None:
            del scheduler.reserved[name]
            if prefix.group is not None:
                scheduler.cancel(prefix.group, set())
            elif prefix.blocks:
                scheduler.blocks.unpin(name)
        return self._answers(prefix, code="NOT_FOUND", reason="name: unregistered meanwhile")

    def recompute(self, scheduler: Scheduler) -> list[tuple[int, Pins]]:
        """A new epoch has nothing in its pools: every prefix is computed again.

        Returns:
            Answers, with the gateways that waited for prefixes that do not fit any more.
        """
        answers = []
        for prefix in list(self._prefixes.values()):
            if prefix.group is None:
                prefix.blocks = 0
                try:
                    self._compute(prefix, scheduler)
                except PrefixRefused as refusal:
                    del self._prefixes[prefix.name], scheduler.reserved[prefix.name]
                    answers += self._answers(prefix, code=refusal.code, reason=refusal.reason)
        return answers

    def states(self, scheduler: Scheduler | None) -> list[PinState]:
        """All registered prefixes."""
        if scheduler is None:
            return []
        return [self._state(prefix, scheduler) for prefix in self._prefixes.values()]

    def _state(self, prefix: _Prefix, scheduler: Scheduler) -> PinState:
        size = scheduler.shape.block_size
        tokens = len(prefix.tokens) // size * size
        return PinState(name=prefix.name, tokens=tokens, blocks=prefix.blocks)
