"""The rows of one forward as paged attention sees them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionRows:
    """Rows of mixed prefill chunks and decodes, as half-open ranges of flat arrays.

    Row s has the queries ``query_begins[s] .. query_begins[s+1]`` and the block table
    ``block_indices[block_begins[s] : block_begins[s+1]]``. `context_lens[s]` tokens precede its first
    query, so query i of the row sees the positions 0 .. context_lens[s] + i, itself included:

        position   0 1 2 3 4 5        context_lens = 3, queries at 3, 4 and 5
        query 0    x x x x            the keys and values of all six are in the cache
        query 1    x x x x x          before attention starts
        query 2    x x x x x x

    All four are integer tensors.
    """

    query_begins: Tensor  # [num_rows + 1]
    context_lens: Tensor  # [num_rows]
    block_indices: Tensor  # [sum of table lengths]
    block_begins: Tensor  # [num_rows + 1]


@dataclass(frozen=True)
class AttentionForm:
    """What a model changes about plain causal attention."""

    window: int | None = None  # tokens that a query sees, itself included; None: all up to its own
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)


PLAIN = AttentionForm()


@dataclass(frozen=True)
class KvScales:
    """One factor per KV head of an fp8 cache: an entry stands for its value times the factor."""

    keys: Tensor  # [num_kv_heads], float32
    values: Tensor  # [num_kv_heads], float32
