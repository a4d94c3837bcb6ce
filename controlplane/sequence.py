"""Sequences and the groups in which they are scheduled."""

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from octavo.controlplane.beam import BeamSearch
from octavo.controlplane.block_manager import SwappedTable
from octavo.controlplane.prefix import Path
from octavo.proto.plan import Beams, Sampling
from octavo.proto.session import Submit
from octavo.proto.wire import Int32s, int32s

SUSPECT_LOSSES = 2


class State(enum.Enum):
    """Where a group is. It is in exactly one of these."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Key(NamedTuple):
    """The one order of groups: admission, resumption, and (largest first) preemption."""

    priority: int  # lower first
    arrival: float  # Unix seconds
    serial: int  # of the submission: breaks ties


class RequestId(NamedTuple):
    """A request among all gateways; `gateway` is an incarnation."""

    gateway: int
    request: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. While it holds a slot, the slot table owns its tokens."""

    group: "SequenceGroup"
    sample: int
    outputs: Int32s  # known output tokens, true while `slot` is None
    slot: int | None = None
    target: int = 0  # tokens that prefill must compute before the first draw
    # Prefill may not start before this sequence has computed `waits_until` tokens: they share blocks.
    waits_for: "Sequence | None" = None
    waits_until: int = 0
    finished: bool = False
    swapped: SwappedTable | None = None  # its blocks in CPU memory


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The samples of one request: admitted, preempted and resumed together."""

    id: RequestId
    attempt: int
    key: Key
    prompt: Int32s
    max_tokens: int
    sampling: Sampling
    sequences: list[Sequence] = field(default_factory=list)
    state: State = State.WAITING
    # Set by `prepare`, when the pool is known:
    end: int = 0  # tokens, prompt included, at which every sample stops
    path: Path | None = None  # the prompt's full blocks, hashed once
    is_single: bool = False  # one sample, no output, nothing shared: what most waiting groups are
    prompt_scores_from: int = 0  # prompt log-probabilities before this position have been delivered
    started: bool = False  # its first row has been planned, ever
    is_prefilling: bool = False  # some sample has tokens to compute before it can draw
    cache_salt: str = ""
    search: BeamSearch | None = None  # of a beam search; the live samples are its beams, in order
    stops: frozenset[int] = frozenset()  # tokens that end a sample
    only_stop: int | None = None  # that token, where there is just one
    prefix: str | None = None  # the name under which the prompt's full blocks are to be pinned
    gang: int | None = None  # where it runs, is preempted, or shall be admitted; None: it is free
    losses: int = 0  # times that a plan of it was lost in which it may have been the cause

    @classmethod
    def from_submit(cls, submit: Submit, serial: int) -> "SequenceGroup":
        group = cls(
            id=RequestId(submit.gateway, submit.request),
            attempt=submit.attempt,
            key=Key(submit.priority, submit.arrival, serial),
            prompt=submit.prompt,
            max_tokens=submit.max_tokens,
            sampling=submit.sampling,
            cache_salt=submit.cache_salt,
        )
        for sample, state in enumerate(submit.samples):
            sequence = Sequence(group, sample, state.tokens, finished=state.finish != "")
            group.sequences.append(sequence)
        sampling = submit.sampling
        eos = () if sampling.ignore_eos else sampling.eos_token_ids.tolist()
        group.stops = frozenset([*eos, *sampling.stop_token_ids.tolist()])
        if len(group.stops) == 1:
            (group.only_stop,) = group.stops
        if submit.beams is not None:
            group.start_search(submit.beams)
        _ = group.sampling.packed  # made now, while the gang computes, and not when a plan is made
        return group

    def dissolve(self) -> None:
        """Nobody needs the ended group any more: its memory is free now, not at the next collection of
        what refers to itself."""
        self.sequences.clear()

    def start_search(self, beams: Beams) -> None:
        """Makes the samples the beams of one search."""
        self.search = BeamSearch(beams, len(self.sequences), self.max_tokens, self.stops)
        self.sampling.candidates = self.search.num_candidates

    @property
    def live(self) -> list[Sequence]:
        """The samples that are not finished."""
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def is_fresh(self) -> bool:
        """Whether no sample has an output yet: one prefill then serves them all."""
        return not any(len(sequence.outputs) for sequence in self.sequences)

    def prepare(self, path: Path | None, end: int) -> None:
        """Sets what follows from the gang's pool."""
        self.path, self.end = path, end
        if self.search is not None:
            self.search.max_length = end - len(self.prompt)
        self.is_single = (
            len(self.sequences) == 1
            and not len(self.sequences[0].outputs)
            and self.search is None
            and self.prefix is None
            and self.sampling.prompt_logprobs is None
            and end > len(self.prompt)
            and not self.is_suspect
        )

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills workers: it then runs alone until it has got a token."""
        return self.losses >= SUSPECT_LOSSES

    @property
    def is_swapped(self) -> bool:
        """Whether its blocks are in CPU memory."""
        return any(sequence.swapped is not None for sequence in self.sequences)

    @property
    def wants_prompt_scores(self) -> bool:
        scores = self.sampling.prompt_logprobs is not None
        return scores and self.prompt_scores_from < len(self.prompt)

    def history(self, sequence: Sequence) -> Int32s:
        """Prompt and known outputs of a sample that holds no slot."""
        return np.concatenate([self.prompt, sequence.outputs]) if len(sequence.outputs) else self.prompt


class OrderedGroups:
    """Groups in the order of their keys. Adding at the end and taking the first are cheap."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self.tokens = 0  # of all prompts

    def add(self, group: SequenceGroup) -> None:
        bisect.insort(self._groups, group, key=_key)
        self.tokens += len(group.prompt)

    def remove(self, group: SequenceGroup) -> None:
        index = bisect.bisect_left(self._groups, group.key, key=_key)
        removed = self._groups.pop(index)
        assert removed is group, "a group's key must not change while it is queued"
        self.tokens -= len(group.prompt)

    def remove_first(self, count: int) -> None:
        self.tokens -= sum(len(group.prompt) for group in self._groups[:count])
        del self._groups[:count]

    def first(self) -> SequenceGroup | None:
        return self._groups[0] if self._groups else None

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)


class RunningGroups:
    """Groups that hold slots, with a count of each level."""

    def __init__(self) -> None:
        self._groups: set[SequenceGroup] = set()
        self._levels: dict[int, int] = {}  # {priority: groups}

    def add(self, *groups: SequenceGroup) -> None:
        self._groups.update(groups)
        for group in groups:
            level = group.key.priority
            self._levels[level] = self._levels.get(level, 0) + 1

    def remove(self, *groups: SequenceGroup) -> None:
        self._groups.difference_update(groups)
        for group in groups:
            level = group.key.priority
            self._levels[level] -= 1
            if not self._levels[level]:
                del self._levels[level]

    def below(self, priority: int) -> list[SequenceGroup]:
        """Groups of lower levels than this one, largest key first."""
        if max(self._levels, default=priority) <= priority:
            return []
        lower = (group for group in self._groups if group.key.priority > priority)
        return sorted(lower, key=_key, reverse=True)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)


def _key(group: SequenceGroup) -> Key:
    return group.key


NO_OUTPUTS = int32s()
