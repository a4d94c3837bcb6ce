"""A plan while it grows."""

from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np

from octavo.controlplane.sequence import Sequence, SequenceGroup
from octavo.controlplane.slots import SlotTable
from octavo.proto.plan import Admits, Plan
from octavo.proto.wire import Int32s, int32s

NONE = int32s()
_NO_ENTRIES = (NONE, NONE, NONE)
NO_ADMITS = Admits()


@dataclass(frozen=True)
class Shape:
    """What a gang can hold, fixed for an epoch."""

    epoch: int
    block_size: int  # tokens
    num_blocks: int
    num_cpu_blocks: int
    num_slots: int
    max_model_len: int  # tokens
    max_batched_tokens: int  # per plan
    prefill_chunk: int  # tokens of one sequence per plan
    watermark: float  # share of blocks that admission leaves free
    block_bytes: int = 0  # of one block, all layers and ranks
    preemption: str = "auto"  # "swap", "recompute" or "auto"
    prefix_caching: bool = True


@dataclass
class Pending:
    """What happened to slots between two plans; the next plan tells the worker."""

    free_slots: dict[int, None] = field(default_factory=dict)  # in order, each once
    forks: list[tuple[int, int, int]] = field(default_factory=list)  # parent, child, sample
    pushes: dict[int, int] = field(default_factory=dict)  # slot -> token

    def add_freed(self, slots: list[int]) -> None:
        """Slots that the worker knows as taken, and that have lost their sequences."""
        self.free_slots.update(dict.fromkeys(slots))
        if self.forks or self.pushes:
            for slot in slots:
                self.drop(slot)

    def drop(self, slot: int) -> None:
        """The slot's sequence is gone, and with it what was to be done to it."""
        if self.forks:
            self.forks = [fork for fork in self.forks if slot not in fork[:2]]
        self.pushes.pop(slot, None)


@dataclass
class Admissions:
    """The columns of `Admits` while they grow."""

    slots: list[int] = field(default_factory=list)
    tokens: list[Int32s] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    block_counts: list[int] = field(default_factory=list)
    blocks: list[Int32s] = field(default_factory=list)  # parts of the column, of any length
    samples: list[int] = field(default_factory=list)
    samplings: list[bytes] = field(default_factory=list)
    prompt_logprobs_from: list[int] = field(default_factory=list)

    def columns(self) -> Admits:
        if not self.slots:
            return NO_ADMITS
        return Admits(
            slots=int32s(self.slots),
            token_counts=int32s([len(tokens) for tokens in self.tokens]),
            tokens=np.concatenate(self.tokens),
            prompt_lens=int32s(self.prompt_lens),
            computed=int32s(self.computed),
            block_counts=int32s(self.block_counts),
            blocks=np.concatenate(self.blocks),
            samples=int32s(self.samples),
            samplings=self.samplings,
            prompt_logprobs_from=int32s(self.prompt_logprobs_from),
        )


@dataclass
class Draft:
    """The parts of a plan, filled by the scheduler in any order."""

    budget: int  # tokens that may still be added
    preempts: bool = False  # a group was preempted for this plan
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block, cpu block
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # cpu block, device block
    admits: Admissions = field(default_factory=Admissions)
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, destination
    forks: list[tuple[int, int, int]] = field(default_factory=list)  # parent, child, sample
    entries: list[tuple[Int32s, Int32s, Int32s]] = field(default_factory=list)  # slot, index, block
    decodes: Int32s = field(default_factory=int32s)
    chunk_slots: list[int] = field(default_factory=list)
    chunk_lengths: list[int] = field(default_factory=list)
    draw_slots: list[int] = field(default_factory=list)
    draw_chunks: list[int] = field(default_factory=list)
    ending: list[Sequence] = field(default_factory=list)  # completed without a draw
    done_with: list[Sequence] = field(default_factory=list)  # to be released once the plan is made

    def add_chunk(self, slot: int, length: int) -> None:
        self.chunk_slots.append(slot)
        self.chunk_lengths.append(length)
        self.budget -= length

    def add_draw(self, slot: int) -> None:
        """A draw from the chunk that was added last."""
        self.draw_slots.append(slot)
        self.draw_chunks.append(len(self.chunk_slots) - 1)

    def add_entries(self, slots: Int32s, indices: Int32s, blocks: Int32s) -> None:
        """Block table entries that change."""
        self.entries.append((slots, indices, blocks))

    @property
    def matters(self) -> bool:
        """Whether there is anything to run, or to copy for a group that comes or goes."""
        return bool(len(self.decodes) or self.chunk_slots or self.admits.slots or self.swap_out)

    def plan(self, epoch: int, number: int, pending: Pending) -> Plan:
        """The finished plan."""
        table_slots, table_indices, table_blocks = self._table()
        return Plan(
            epoch=epoch,
            number=number,
            copies=_ints(self.copies),
            swap_out=_ints(self.swap_out),
            swap_in=_ints(self.swap_in),
            free_slots=_ints(list(pending.free_slots)),
            admits=self.admits.columns(),
            forks=_ints(pending.forks + self.forks),
            push_slots=_ints(list(pending.pushes)),
            push_tokens=_ints(list(pending.pushes.values())),
            table_slots=table_slots,
            table_indices=table_indices,
            table_blocks=table_blocks,
            decode_slots=self.decodes,
            chunk_slots=_ints(self.chunk_slots),
            chunk_lengths=_ints(self.chunk_lengths),
            draw_slots=_ints(self.draw_slots),
            draw_chunks=_ints(self.draw_chunks),
        )

    def _table(self) -> tuple[Int32s, Int32s, Int32s]:
        """The columns of `entries`."""
        if len(self.entries) < 2:
            return self.entries[0] if self.entries else _NO_ENTRIES
        slots, indices, blocks = map(np.concatenate, zip(*self.entries, strict=True))
        return slots, indices, blocks


def _ints(values: Sized) -> Int32s:
    """Most parts of most plans are empty."""
    return int32s(values) if values else NONE


@dataclass
class Flight:
    """A plan that was sent and has no result yet."""

    number: int
    rows: Int32s  # slots for which tokens are drawn, in the result's order
    generations: Int32s  # of those slots when the plan was sent
    chunks: list[SequenceGroup]  # whose each chunk is
    chunk_tokens: int
    ending: list[Sequence]  # sequences that this plan completes without a draw

    def current_rows(self, slots: SlotTable) -> Int32s:
        """The rows whose slots still belong to the sequences for which they were sent."""
        current: Int32s = self.rows[slots.generation[self.rows] == self.generations]
        return current
