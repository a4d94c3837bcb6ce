"""What a worker measures of itself before it registers."""

import time
from collections.abc import Callable

import numpy as np

from octavo.dataplane.engine import Batch, Engine

_TOKENS = 64
_REPEATS = 2  # the first one pays for what libraries set up


def measure(engine: Engine) -> tuple[float, float]:
    """Prefill speed in tokens per second, and the bandwidth between the pools in bytes per second."""
    info = engine.describe()
    size = info.preferred_block_size
    num_blocks = -(-_TOKENS // size)
    engine.make_pools(num_blocks, size, num_blocks)
    prefill = _seconds(engine, lambda: engine.logits(engine.forward(_prompt(num_blocks))))
    ids = np.arange(num_blocks, dtype=np.int32)
    swap = _seconds(engine, lambda: engine.swap_out(np.repeat(ids, 2)))
    return _TOKENS / prefill, num_blocks * size * info.token_bytes / swap


def _seconds(engine: Engine, call: Callable[[], object]) -> float:
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        engine.synchronize()
        seconds = time.perf_counter() - begin
    return max(seconds, 1e-9)


def _prompt(num_blocks: int) -> Batch:
    tokens = np.arange(_TOKENS, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(_TOKENS, dtype=np.int32),
        positions=tokens,
        kv_slots=tokens,
        query_begins=np.array([0, _TOKENS], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32),
        block_indices=np.arange(num_blocks, dtype=np.int32),
        block_begins=np.array([0, num_blocks], dtype=np.int32),
        logit_tokens=tokens[-1:],
    )
