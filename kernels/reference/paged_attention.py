"""Causal attention over keys and values that lie in the blocks of a paged cache.

Source: PagedAttention, Kwon et al., SOSP 2023, section 4.1.
"""

import torch
from torch import Tensor

from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: AttentionRows,
    scale: float,
    form: AttentionForm = PLAIN,
    scales: KvScales | None = None,
) -> Tensor:
    """Attends each query to the positions of its row up to its own.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; tokens outside all rows get zeros.
        key_cache, value_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``. Positions that
            no query may see are never read: they may hold NaN.
        rows: which queries belong together, and their block tables.
        scale: factor of the scores.
        form: a sliding window and a soft cap of the scores, if the model has them.
        scales: what an fp8 cache's entries are multiplied by.

    Returns:
        ``[num_tokens, num_heads, head_dim]``, in the dtype of `query`.
    """
    output = torch.zeros_like(query)
    begins = rows.query_begins.tolist()
    tables = rows.block_begins.tolist()
    for row, context in enumerate(rows.context_lens.tolist()):
        first, last = begins[row], begins[row + 1]
        if first == last:
            continue
        blocks = rows.block_indices[tables[row] : tables[row + 1]].long()
        total = context + last - first
        keys = _gather(key_cache, blocks, total)
        values = _gather(value_cache, blocks, total)
        if scales is not None:
            keys, values = _scaled(keys, scales.keys, query), _scaled(values, scales.values, query)
        output[first:last] = _attend(query[first:last], keys, values, context, scale, form)
    return output


def _gather(cache: Tensor, blocks: Tensor, total: int) -> Tensor:
    """The first `total` positions of a block table: ``[num_kv_heads, total, head_dim]``."""
    _, num_kv_heads, _, head_dim = cache.shape
    return cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :total]


def _scaled(entries: Tensor, factors: Tensor, query: Tensor) -> Tensor:
    return entries.to(query.dtype) * factors.to(query.dtype)[:, None, None]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, context: int, scale: float, form: AttentionForm
) -> Tensor:
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, total, _ = keys.shape
    grouped = query.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,ktd->kgqt", grouped, keys) * scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    positions = torch.arange(total, device=query.device)
    last_seen = context + torch.arange(num_queries, device=query.device)
    hidden = positions[None, :] > last_seen[:, None]
    if form.window is not None:
        hidden |= positions[None, :] <= last_seen[:, None] - form.window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    attended = torch.einsum("kgqt,ktd->qkgd", weights, values)
    return attended.reshape(num_queries, num_heads, head_dim)


def prepare_attention(rows: AttentionRows, key_cache: Tensor) -> AttentionRows:
    """What `paged_attention` wants to know of the rows before the first layer: nothing more."""
    return rows
