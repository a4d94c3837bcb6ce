"""From slots and a plan's rows to the flat arrays of one forward."""

from dataclasses import dataclass

import numpy as np

from octavo.dataplane.engine import Batch
from octavo.dataplane.slots import Ints, PlanError, Slots
from octavo.proto.plan import Plan
from octavo.proto.wire import Int32s


@dataclass(frozen=True)
class Rows:
    """The rows of a plan, decodes first, then chunks.

    Row r computes ``tokens[slots[r], starts[r] : ends[r]]``:

        tokens     p p p p p p p o        decode: starts 7, ends 8
        computed   x x x x x x x          chunk of 2 where 4 are computed: starts 4, ends 6
    """

    slots: Ints  # [num_rows]
    starts: Ints  # [num_rows]
    ends: Ints  # [num_rows]
    num_decodes: int
    query_begins: Ints  # [num_rows + 1]

    def last_tokens(self) -> Ints:
        """Index of each row's last token in the batch: ``[num_rows]``."""
        return self.query_begins[1:] - 1

    def chunk(self, index: int) -> int:
        """The row of chunk `index` of the plan."""
        return self.num_decodes + index


def rows_of(plan: Plan, slots: Slots, max_tokens: int) -> Rows:
    """Checks the plan's rows against the slots. Raises PlanError."""
    decodes, chunks = plan.decode_slots, plan.chunk_slots
    row_slots = np.concatenate((decodes, chunks))
    lengths = slots.lengths[row_slots]
    starts = slots.computed[row_slots]
    counts = np.concatenate((np.ones(len(decodes), dtype=np.int32), plan.chunk_lengths))
    _check_rows(row_slots, starts, counts, lengths, len(decodes), slots, max_tokens)
    return Rows(
        slots=row_slots,
        starts=starts,
        ends=starts + counts,
        num_decodes=len(decodes),
        query_begins=_begins(counts),
    )


def _check_rows(
    row_slots: Ints,
    starts: Ints,
    counts: Ints,
    lengths: Ints,
    decodes: int,
    slots: Slots,
    max_tokens: int,
) -> None:
    _check(slots.live[row_slots], row_slots, "holds no sequence")
    _check(
        starts[:decodes] == lengths[:decodes] - 1, row_slots, "decodes, but more than one is to compute"
    )
    wide = counts.astype(np.int64)
    _check((wide >= 1) & (starts + wide <= lengths), row_slots, "has a chunk beyond its tokens")
    _check(lengths <= slots.max_model_len, row_slots, f"is beyond {slots.max_model_len} tokens")
    covered = slots.num_blocks[row_slots].astype(np.int64) * slots.block_size
    _check(starts + wide <= covered, row_slots, "has too short a block table")
    if len(set(row_slots.tolist())) != len(row_slots):
        raise PlanError("rows: a slot occurs twice")
    if int(wide.sum()) > max_tokens:
        raise PlanError(f"rows: {int(wide.sum())} tokens exceed the limit of {max_tokens}")


def _check(good: np.ndarray[tuple[int], np.dtype[np.bool_]], row_slots: Ints, fault: str) -> None:
    if not good.all():
        raise PlanError(f"rows: slot {int(row_slots[np.argmin(good)])} {fault}")


def batch_of(rows: Rows, slots: Slots, logit_tokens: Ints) -> Batch:
    """The arrays of one forward over `rows`."""
    begins = rows.query_begins
    token_slots, positions = _tokens_of(rows)
    size = slots.block_size
    blocks = slots.blocks[token_slots, positions // size]
    indices, block_begins = _block_tables(rows, slots)
    return Batch(
        token_ids=slots.tokens[token_slots, positions],
        positions=positions,
        kv_slots=_kv_slots(blocks, positions % size, size),
        query_begins=begins,
        context_lens=rows.starts,
        block_indices=indices,
        block_begins=block_begins,
        logit_tokens=logit_tokens,
    )


def _tokens_of(rows: Rows) -> tuple[Ints, Ints]:
    """The slot and the position of each token of the rows: ``[num_tokens]``."""
    if rows.num_decodes == len(rows.slots):
        return rows.slots, rows.starts
    begins = rows.query_begins
    row_of_token = np.repeat(np.arange(len(rows.slots), dtype=np.int32), np.diff(begins))
    offsets = np.arange(begins[-1], dtype=np.int32) - begins[:-1][row_of_token]
    return rows.slots[row_of_token], rows.starts[row_of_token] + offsets


def _kv_slots(blocks: Ints, offsets: Ints, block_size: int) -> Ints:
    return blocks * np.int32(block_size) + offsets


def _block_tables(rows: Rows, slots: Slots) -> tuple[Ints, Ints]:
    counts = -(-rows.ends // slots.block_size)
    columns = np.arange(int(counts.max(initial=0)))
    tables = slots.blocks[rows.slots, : len(columns)]
    return tables[columns < counts[:, None]], _begins(counts)


def _begins(counts: Ints | Int32s) -> Ints:
    begins = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins
