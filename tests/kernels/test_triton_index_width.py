"""Caches of more than 2^31 entries: offsets of 32 bits would wrap, in the interpreter as on a card.

The system commits memory when a page is first written, so of the 4 GiB that a cache of float16 spans
only the few blocks that are used take any.
"""

from collections.abc import Iterator

import pytest
import torch
from kernel_inputs import begins, relative_error
from torch import Tensor

from octavo.kernels.rows import AttentionRows
from octavo.kernels.table import REFERENCE, kernels_named

TRITON = kernels_named("triton", "cpu")
BLOCK_SIZE, HEAD_DIM = 16, 64
NUM_BLOCKS = 2**31 // (BLOCK_SIZE * HEAD_DIM) + 8
BLOCKS = torch.tensor([NUM_BLOCKS - 1, 3, NUM_BLOCKS - 5, NUM_BLOCKS - 2])


@pytest.fixture
def cache() -> Iterator[Tensor]:
    made = torch.empty(NUM_BLOCKS, 1, BLOCK_SIZE, HEAD_DIM, dtype=torch.float16)
    assert made.numel() > 2**31
    made[BLOCKS] = torch.randn(len(BLOCKS), 1, BLOCK_SIZE, HEAD_DIM).half()
    yield made


def test_attention_reads_beyond_them(cache: Tensor) -> None:
    query = torch.randn(2, 3, HEAD_DIM).half()
    indices = torch.cat((BLOCKS[:2], BLOCKS[2:]))
    rows = AttentionRows(begins([1, 1]), torch.tensor([25, 18]), indices, begins([2, 2]))
    found = TRITON.paged_attention(query, cache, cache, TRITON.prepare_attention(rows, cache), 0.2)
    small = cache[BLOCKS].double()
    rows = AttentionRows(rows.query_begins, rows.context_lens, torch.arange(4), rows.block_begins)
    wanted = REFERENCE.paged_attention(query.double(), small, small, rows, 0.2)
    assert relative_error(found, wanted) < 5e-4


def test_writes_go_beyond_them(cache: Tensor) -> None:
    keys = torch.randn(2, 1, HEAD_DIM).half()
    slots = BLOCKS[:2] * BLOCK_SIZE + torch.tensor([15, 0])
    wanted = cache[BLOCKS].clone()
    wanted[0, 0, 15], wanted[1, 0, 0] = keys[0, 0], keys[1, 0]
    TRITON.kv_write(keys, keys, cache, cache, TRITON.prepare_kv_write(slots, cache))
    assert torch.equal(cache[BLOCKS], wanted)


def test_blocks_move_beyond_them(cache: Tensor) -> None:
    held = cache[BLOCKS].clone()
    staging = TRITON.block_gather([cache], BLOCKS)
    assert torch.equal(staging[:, 0], held)
    TRITON.block_scatter(staging, [cache], BLOCKS.flip(0))
    assert torch.equal(cache[BLOCKS], held.flip(0))
    TRITON.block_copy([cache], BLOCKS[:2], BLOCKS[2:])
    assert torch.equal(cache[BLOCKS[2:]], held.flip(0)[:2])
