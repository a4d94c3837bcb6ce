"""A plan while it grows."""

from dataclasses import dataclass, field

from octavo.controlplane.sequence import Sequence, SequenceGroup
from octavo.proto.plan import Admit, Plan
from octavo.proto.wire import Int32s, int32s


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

    def drop(self, slot: int) -> None:
        """The slot's sequence is gone, and with it what was to be done to it."""
        if self.forks:
            self.forks = [fork for fork in self.forks if slot not in fork[:2]]
        self.pushes.pop(slot, None)


@dataclass
class Draft:
    """The parts of a plan, filled by the scheduler in any order."""

    budget: int  # tokens that may still be added
    preempts: bool = False  # a group was preempted for this plan
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block, cpu block
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # cpu block, device block
    admits: list[Admit] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, destination
    forks: list[tuple[int, int, int]] = field(default_factory=list)  # parent, child, sample
    entries: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, block
    decodes: Int32s = field(default_factory=int32s)
    chunks: list[tuple[int, int]] = field(default_factory=list)  # slot, length
    draws: list[tuple[int, int]] = field(default_factory=list)  # slot, chunk
    ending: list[Sequence] = field(default_factory=list)  # completed without a draw
    done_with: list[Sequence] = field(default_factory=list)  # to be released once the plan is made

    @property
    def matters(self) -> bool:
        """Whether there is anything to run, or to copy for a group that comes or goes."""
        return bool(len(self.decodes) or self.chunks or self.admits or self.swap_out)

    def plan(self, epoch: int, number: int, pending: Pending) -> Plan:
        """The finished plan."""
        entries = int32s(self.entries).reshape(-1, 3)
        chunks = int32s(self.chunks).reshape(-1, 2)
        draws = int32s(self.draws).reshape(-1, 2)
        return Plan(
            epoch=epoch,
            number=number,
            copies=int32s(self.copies),
            swap_out=int32s(self.swap_out),
            swap_in=int32s(self.swap_in),
            free_slots=int32s(list(pending.free_slots)),
            admits=self.admits,
            forks=int32s(pending.forks + self.forks),
            push_slots=int32s(list(pending.pushes)),
            push_tokens=int32s(list(pending.pushes.values())),
            table_slots=entries[:, 0],
            table_indices=entries[:, 1],
            table_blocks=entries[:, 2],
            decode_slots=self.decodes,
            chunk_slots=chunks[:, 0],
            chunk_lengths=chunks[:, 1],
            draw_slots=draws[:, 0],
            draw_chunks=draws[:, 1],
        )


@dataclass
class Flight:
    """A plan that was sent and has no result yet."""

    number: int
    rows: Int32s  # slots for which tokens are drawn, in the result's order
    generations: Int32s  # of those slots when the plan was sent
    chunks: list[SequenceGroup]  # whose each chunk is
    chunk_tokens: int
    ending: list[Sequence]  # sequences that this plan completes without a draw
