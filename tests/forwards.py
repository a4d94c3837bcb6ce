"""The arrays of one forward, for tests that drive an engine without a runner."""

import numpy as np

from octavo.dataplane.engine import Batch, Ints
from octavo.proto.wire import int32s

SIZE = 32  # tokens of a block


def batch_of_rows(rows: list[tuple[list[int], int, list[int]]], wanted: list[int]) -> Batch:
    """Rows of (all tokens up to the last to compute, number computed before, block table)."""
    counts = [len(tokens) - computed for tokens, computed, _ in rows]
    tables = [table[: -(-len(tokens) // SIZE)] for tokens, _, table in rows]
    positions = [np.arange(computed, len(tokens)) for tokens, computed, _ in rows]
    slots = [
        np.array(table)[p // SIZE] * SIZE + p % SIZE for table, p in zip(tables, positions, strict=True)
    ]

    def flat(parts: list[np.ndarray]) -> Ints:
        return np.concatenate(parts).astype(np.int32)

    return Batch(
        token_ids=flat([np.array(tokens[computed:]) for tokens, computed, _ in rows]),
        positions=flat(positions),
        kv_slots=flat(slots),
        query_begins=flat([np.cumsum([0, *counts])]),
        context_lens=flat([np.array([computed for _, computed, _ in rows])]),
        block_indices=flat([np.array(table) for table in tables]),
        block_begins=flat([np.cumsum([0, *map(len, tables)])]),
        logit_tokens=int32s(wanted),
    )
