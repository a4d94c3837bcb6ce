"""A plan while it grows."""

from dataclasses import dataclass, field

from octavo.controlplane.sequence import Sequence
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


@dataclass
class Draft:
    """The parts of a plan, filled by the scheduler in any order."""

    budget: int  # tokens that may still be added
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
    def has_rows(self) -> bool:
        return len(self.decodes) > 0 or len(self.chunks) > 0

    def plan(self, epoch: int, number: int, free_slots: list[int]) -> Plan:
        """The finished plan."""
        entries = int32s(self.entries).reshape(-1, 3)
        chunks = int32s(self.chunks).reshape(-1, 2)
        draws = int32s(self.draws).reshape(-1, 2)
        return Plan(
            epoch=epoch,
            number=number,
            copies=int32s(self.copies),
            free_slots=int32s(free_slots),
            admits=self.admits,
            forks=int32s(self.forks),
            table_slots=entries[:, 0],
            table_indices=entries[:, 1],
            table_blocks=entries[:, 2],
            decode_slots=self.decodes,
            chunk_slots=chunks[:, 0],
            chunk_lengths=chunks[:, 1],
            draw_slots=draws[:, 0],
            draw_chunks=draws[:, 1],
        )
