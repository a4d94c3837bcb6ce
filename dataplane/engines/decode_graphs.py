"""Decode steps as CUDA graphs: one launch in place of some hundreds, where launching takes longer than
computing.

A graph has fixed shapes and addresses. There is one for each size of a ladder; a batch takes the next
larger one, with rows that have no query in the places that are left over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.dataplane.engine import Batch, Ints
from octavo.kernels.rows import AttentionRows

# Steps of 8 from 16 on keep the padding below a half; beyond 256 rows computing takes longer than
# launching.
LADDER = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
# Positions in the block tables of a batch, at most: attention's scratch memory grows with it. Batches
# with more run without a graph, and launching is nothing to what they compute.
MOST_POSITIONS = 1 << 18


@dataclass(frozen=True)
class Inputs:
    """What a forward reads, on the device."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    logit_tokens: Tensor
    rows: AttentionRows


@dataclass(frozen=True)
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    inputs: Inputs
    numbers: Tensor  # [n] int64 on the device: all inputs, as `_numbers` lays them out
    hidden: Tensor  # [size, hidden_size]


class DecodeGraphs:
    """Graphs over one set of pools. Captured when the pools are made."""

    def __init__(
        self, forward: Callable[[Inputs], Tensor], device: torch.device, block_size: int, max_rows: int
    ) -> None:
        """
        Args:
            forward: what is captured; it must not depend on anything but its inputs' shapes.
            max_rows: no batch has more.
        """
        self._device = device
        self._most_blocks = MOST_POSITIONS // block_size
        sizes = [size for size in LADDER if size < max_rows] + [min(max_rows, LADDER[-1])]
        self._captured: dict[int, _Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(set(sizes), reverse=True):  # the largest first: the others reuse its memory
            self._captured[size] = self._capture(forward, size, pool)
        self._sizes = sorted(self._captured)

    def _capture(self, forward: Callable[[Inputs], Tensor], size: int, pool: Any) -> _Captured:
        values = numbers_of(_NOBODY, size, self._most_blocks)
        numbers = torch.from_numpy(values).to(self._device)
        inputs = inputs_in(numbers, size, self._most_blocks)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles kernels and fills libraries' caches
            forward(inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = forward(inputs)
        return _Captured(graph, inputs, numbers, hidden)

    def run(self, batch: Batch) -> Tensor | None:
        """The final hidden states of a batch of decodes: ``[num_rows, hidden_size]``.

        They are valid until the next call. None: no graph fits the batch.
        """
        size = self._size_for(batch)
        if size is None:
            return None
        captured = self._captured[size]
        values = torch.from_numpy(numbers_of(batch, size, self._most_blocks))
        # A fresh pinned buffer each time: the one before may still be read. Torch keeps them for reuse.
        captured.numbers.copy_(values.pin_memory(), non_blocking=True)
        if batch.late_tokens is not None and batch.late_values is not None:
            late = torch.from_numpy(batch.late_tokens.astype(np.int64)).to(self._device)
            captured.inputs.token_ids[late] = batch.late_values
        captured.graph.replay()
        return captured.hidden[: len(batch.context_lens)]

    def _size_for(self, batch: Batch) -> int | None:
        rows = len(batch.context_lens)
        if not is_decode(batch) or len(batch.block_indices) > self._most_blocks:
            return None
        return next((size for size in self._sizes if size >= rows), None)


def is_decode(batch: Batch) -> bool:
    """Whether every row has one query, whose logits are wanted, in the order of the rows."""
    rows = len(batch.context_lens)
    if not rows or len(batch.token_ids) != rows or not takes_all(batch):
        return False
    return bool((np.diff(batch.query_begins) == 1).all())


def takes_all(batch: Batch) -> bool:
    """Whether the logits of all tokens are wanted, in their order."""
    count = len(batch.token_ids)
    return len(batch.logit_tokens) == count and bool((batch.logit_tokens == np.arange(count)).all())


_NONE = np.zeros(0, dtype=np.int32)
_NOBODY = Batch(
    token_ids=_NONE,
    positions=_NONE,
    kv_slots=_NONE,
    query_begins=np.zeros(1, dtype=np.int32),
    context_lens=_NONE,
    block_indices=_NONE,
    block_begins=np.zeros(1, dtype=np.int32),
    logit_tokens=_NONE,
)


def rehearsals(block_size: int, longest: int) -> Iterator[Batch]:
    """Small batches that between them use every kind of kernel once, so that none is compiled later:
    chunks and decodes, with rows that are short and with rows that attention splits.

    Args:
        longest: context of the long rows, in tokens.
    """
    mixes = (([0, 1], [1, 1]), ([0, 1], [5, 1]), ([longest, 1], [1, 1]), ([longest, 1], [5, 1]))
    for contexts, counts in mixes:
        yield rows_in_one_block(contexts, counts, block_size)


def rows_in_one_block(contexts: list[int], counts: list[int], block_size: int) -> Batch:
    """Rows whose block tables name the first block only, and of which nothing is stored."""
    begins = np.cumsum([0, *counts])
    positions = [range(c, c + n) for c, n in zip(contexts, counts, strict=True)]
    tables = [-(-part.stop // block_size) for part in positions]
    return Batch(
        token_ids=np.zeros(begins[-1], dtype=np.int32),
        positions=np.concatenate([np.asarray(part, dtype=np.int32) for part in positions]),
        kv_slots=np.full(begins[-1], -1, dtype=np.int32),
        query_begins=begins.astype(np.int32),
        context_lens=np.asarray(contexts, dtype=np.int32),
        block_indices=np.zeros(sum(tables), dtype=np.int32),
        block_begins=np.cumsum([0, *tables]).astype(np.int32),
        logit_tokens=(begins[1:] - 1).astype(np.int32),
    )


def numbers_of(batch: Batch, size: int, most_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All inputs of a batch of decodes, filled up to `size` rows, in one array.

    Rows that fill up have no query and no blocks, and what they write goes nowhere:

        query_begins   0 1 2 3 | 3 3       three rows in a graph of five
        kv_slots       s s s   | -1 -1
    """
    parts = (
        _filled(batch.token_ids, size, 0),
        _filled(batch.positions, size, 0),
        _filled(batch.kv_slots, size, -1),
        np.arange(size),
        _filled(batch.query_begins, size + 1, int(batch.query_begins[-1])),
        _filled(batch.context_lens, size, 0),
        _filled(batch.block_begins, size + 1, int(batch.block_begins[-1])),
        _filled(batch.block_indices, most_blocks, 0),
    )
    return np.concatenate(parts).astype(np.int64)


def _filled(values: Ints, count: int, value: int) -> Ints:
    filled = np.full(count, value, dtype=np.int32)
    filled[: len(values)] = values
    return filled


def inputs_in(numbers: Tensor, size: int, most_blocks: int) -> Inputs:
    """The parts of what `numbers_of` made, as views."""
    counts = [size, size, size, size, size + 1, size, size + 1, most_blocks]
    parts = torch.split(numbers, counts)
    tokens, positions, kv_slots, logits, begins, contexts, tables, blocks = parts
    return Inputs(tokens, positions, kv_slots, logits, AttentionRows(begins, contexts, blocks, tables))
