"""The inputs of each operation's tests: small, permuted, and with NaN wherever nothing may be read."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows

FORMS = [
    AttentionForm(window=1),
    AttentionForm(window=20),
    AttentionForm(soft_cap=2.5),
    AttentionForm(window=33, soft_cap=0.5),
]
# (context, queries) of each row around the borders of blocks of 4: 0, 1, B-1, B, B+1 and many.
ROW_MIXES = {
    "decodes": [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (40, 1), (41, 1)],
    "chunks": [(0, 3), (0, 4), (0, 5), (3, 2), (4, 9), (17, 30), (64, 1)],
    "mixed": [(7, 1), (0, 6), (0, 0), (30, 1), (4, 4), (1, 1)],
    "long": [(0, 300), (280, 1), (5, 290), (279, 1)],
}
HEADS = [(2, 2), (6, 2), (4, 1), (7, 1)]  # query and KV heads: groups of 1, 3, 4 and 7


@dataclass
class AttentionCase:
    """Inputs of paged attention, and the same keys and values without blocks."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    rows: AttentionRows
    keys: list[Tensor]  # of each row: [total, num_kv_heads, head_dim]
    values: list[Tensor]


def attention_case(
    mix: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float64,
) -> AttentionCase:
    """Rows with permuted block tables in caches that are NaN where no token of a row lies."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    counts = [-(-(context + queries) // block_size) for context, queries in mix]
    order = np.random.default_rng(3).permutation(sum(counts) + 5)
    shape = (len(order), heads[1], block_size, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    keys, values, tables = [], [], np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    for (context, queries), table in zip(mix, tables, strict=True):
        total = context + queries
        parts = normal(total, heads[1], head_dim), normal(total, heads[1], head_dim)
        for cache, part in zip(caches, parts, strict=True):
            for position in range(total):
                cache[table[position // block_size], :, position % block_size] = part[position]
        keys.append(parts[0])
        values.append(parts[1])
    query_counts = [queries for _, queries in mix]
    rows = AttentionRows(
        query_begins=begins(query_counts),
        context_lens=torch.tensor([context for context, _ in mix]),
        block_indices=torch.tensor(order[: sum(counts)]),
        block_begins=begins(counts),
    )
    query = normal(sum(query_counts), heads[0], head_dim)
    return AttentionCase(query, caches[0], caches[1], rows, keys, values)


def begins(counts: list[int]) -> Tensor:
    """Half-open ranges one after the other."""
    return torch.tensor([0, *np.cumsum(counts)])


def plain_attention(case: AttentionCase, scale: float, form: AttentionForm = PLAIN) -> Tensor:
    """The softmax formula, one query and one head at a time, in numpy and float64."""
    output = np.zeros(case.query.shape)
    query = case.query.double().numpy()
    group = case.query.shape[1] // case.key_cache.shape[1]
    first_queries = case.rows.query_begins.tolist()
    for row, context in enumerate(case.rows.context_lens.tolist()):
        keys, values = case.keys[row].double().numpy(), case.values[row].double().numpy()
        for index in range(first_queries[row], first_queries[row + 1]):
            end = context + index - first_queries[row] + 1
            seen = slice(0 if form.window is None else max(0, end - form.window), end)
            for head in range(query.shape[1]):
                scores = keys[seen, head // group] @ query[index, head] * scale
                if form.soft_cap is not None:
                    scores = np.tanh(scores / form.soft_cap) * form.soft_cap
                weights = np.exp(scores - scores.max())
                output[index, head] = weights / weights.sum() @ values[seen, head // group]
    return torch.from_numpy(output)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """``|found - wanted| / |wanted|``."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
