"""Which part of a model a rank of a gang holds, and what the ranks do together.

Attention is divided by heads and the MLP by its inner size: the matrices into them by rows, those out
of them by columns, whose products are summed over the ranks (Shoeybi et al., "Megatron-LM", 2019,
section 3). The vocabulary is divided too: of the embedding and of the head.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from octavo.common.modelfiles import ModelError


@dataclass(frozen=True)
class Shard:
    """One rank of a gang."""

    rank: int = 0
    size: int = 1  # ranks of the gang

    def divide(self, what: str, total: int) -> range:
        """This rank's part, as large as every other. Raises ModelError, which names the number."""
        if total % self.size:
            raise self.indivisible(what, total)
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def shares(self, total: int) -> list[range]:
        """The parts of all ranks, which differ by one at most."""
        bounds = [total * rank // self.size for rank in range(self.size + 1)]
        return [range(*pair) for pair in pairwise(bounds)]

    def indivisible(self, what: str, total: int) -> ModelError:
        return ModelError(
            f"--tensor-parallel {self.size}: {what} {total} cannot be divided by {self.size}"
        )


class Collectives(Protocol):
    """What the ranks of a gang compute together. Every rank must call the same, in the same order."""

    @property
    def shard(self) -> Shard:
        """Which rank this is."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, to the last bit the same on each. May overwrite `part`."""

    def all_gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        """All ranks' ``[n, sizes[rank]]`` side by side: ``[n, sum(sizes)]``."""


class Alone:
    """The collectives of a worker that holds the whole model."""

    shard = Shard()

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        return part


ALONE: Collectives = Alone()


class Divisible(Protocol):
    """The numbers of a model that are divided."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def inner_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class Split:
    """A rank's part of a model's numbers."""

    collectives: Collectives
    heads: range  # of queries
    kv_heads: range
    inner: range  # of the MLP
    vocabulary: list[range]  # the parts of all ranks
    head_dim: int

    @classmethod
    def of(cls, config: Divisible, collectives: Collectives) -> "Split":
        """Raises ModelError where a number cannot be divided."""
        shard = collectives.shard
        return cls(
            collectives=collectives,
            heads=shard.divide("num_attention_heads", config.num_heads),
            kv_heads=_kv_heads(shard, config.num_kv_heads),
            inner=shard.divide("intermediate_size", config.inner_size),
            vocabulary=shard.shares(config.vocab_size),
            head_dim=config.head_dim,
        )

    @property
    def tokens(self) -> range:
        """The token ids whose embeddings and logits this rank has."""
        return self.vocabulary[self.collectives.shard.rank]

    @property
    def attended(self) -> range:
        """Columns of the matrix out of attention."""
        return self.rows_of(self.heads)

    def rows_of(self, heads: range, first: int = 0) -> range:
        """Rows of a projection that make these heads.

        Args:
            first: the row of head 0.
        """
        return range(first + heads.start * self.head_dim, first + heads.stop * self.head_dim)


def _kv_heads(shard: Shard, num_kv_heads: int) -> range:
    """An equal part, or where there are more ranks than heads, one that several ranks have:

    rank       0 1 2 3 4 5
    KV head    0 0 0 1 1 1        six ranks, two KV heads
    """
    if shard.size <= num_kv_heads:
        return shard.divide("num_key_value_heads", num_kv_heads)
    if shard.size % num_kv_heads:
        raise shard.indivisible("num_key_value_heads", num_kv_heads)
    head = shard.rank // (shard.size // num_kv_heads)
    return range(head, head + 1)
