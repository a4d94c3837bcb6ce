"""Teacher forcing: an engine's logits at every position of a given text, chunk by chunk."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.dataplane.engine import Batch, Engine

Ints = npt.NDArray[np.int32]


class Forcer:
    """Feeds an engine windows of tokens, each in chunks, through a shuffled block table."""

    def __init__(self, engine: Engine, window: int, chunk: int, seed: int = 0) -> None:
        """`window` and `chunk` in tokens. Raises EngineError when there is no memory for the pools."""
        self._engine, self._window, self._chunk = engine, window, chunk
        self._block_size = engine.describe().preferred_block_size
        blocks = -(-window // self._block_size)
        engine.make_pools(blocks, self._block_size, 0)
        self._table: Ints = np.random.default_rng(seed).permutation(blocks).astype(np.int32)

    def logits(self, tokens: Ints) -> Iterator[Tensor]:
        """``[tokens of the chunk, vocab_size]`` for each chunk."""
        if len(tokens) > self._window:
            raise ValueError(f"{len(tokens)} tokens are more than the window of {self._window}")
        for start in range(0, len(tokens), self._chunk):
            batch = self._batch(tokens[start : start + self._chunk], start)
            yield self._engine.logits(self._engine.forward(batch)).float().cpu()

    def _batch(self, tokens: Ints, start: int) -> Batch:
        count = len(tokens)
        positions = np.arange(start, start + count, dtype=np.int32)
        size = np.int32(self._block_size)
        blocks = -(-(start + count) // self._block_size)
        return Batch(
            token_ids=tokens,
            positions=positions,
            kv_slots=self._table[positions // size] * size + positions % size,
            query_begins=np.array([0, count], dtype=np.int32),
            context_lens=np.array([start], dtype=np.int32),
            block_indices=self._table[:blocks],
            block_begins=np.array([0, blocks], dtype=np.int32),
            logit_tokens=np.arange(count, dtype=np.int32),
        )


def windows(tokens: Ints, window: int, count: int) -> list[Ints]:
    """Consecutive windows of at most `window` tokens that cover the first `count` tokens."""
    return [tokens[start : min(start + window, count)] for start in range(0, count, window)]


def divergence(base: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of `other` from `base`, in nats, for each row of logits: ``[n]``."""
    ours = torch.log_softmax(base.double(), dim=-1)
    theirs = torch.log_softmax(other.double(), dim=-1)
    return (ours.exp() * (ours - theirs)).sum(dim=-1)


def surprise(logits: Tensor, following: Tensor) -> Tensor:
    """Minus the log-probability, in nats, of the token that followed each position: ``[n]``."""
    chosen = torch.log_softmax(logits.double(), dim=-1).gather(1, following.long()[:, None])
    return -chosen.squeeze(1)
