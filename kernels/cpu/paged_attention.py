"""Paged attention for CPUs: gather keys and values of a few rows at a time, then dense attention.

Decodes of similar length share one gather and one call. A group is small enough that what it
gathers stays in the processor's cache until attention has read it, and no smaller: each call costs a
hand-over between threads. A whole step of SmolLM2-135M in fp32 on two cores takes, in groups of 1.5,
3, 6 and 12 MiB, 190, 178, 170 and 178 ms for 64 decodes at context 256 and 115, 104, 98 and 100 ms for
16 at context 1,024; with all 64 in one group of 24 MiB it takes 510 ms.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference import paged_attention as reference
from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales

GROUP_BYTES = 6 << 20  # of keys and values that one group of decodes gathers, padding included
QUERY_TILE = 256  # queries of a chunk that attend at once

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one query each, padded to `length` tokens."""

    queries: Tensor  # [n], indices of tokens
    gather: (
        Tensor  # [n * num_kv_heads * blocks], rows of a cache seen as [num_blocks * num_kv_heads, -1]
    )
    padding: Tensor  # indices in [n * num_kv_heads * length] that no query may see
    mask: Tensor | None  # [n, 1, 1, length], 0 or -inf; None where nothing is padded
    length: int


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of a chunk, and the keys that the last of them sees."""

    first: int
    last: int
    num_keys: int
    mask: Tensor | None  # [last - first, num_keys]; None: plain causal from position 0


@dataclass(frozen=True)
class Chunk:
    """A row of several queries."""

    gather: Tensor  # as in DecodeGroup, n = 1
    tiles: list[Tile]


@dataclass(frozen=True)
class PreparedRows:
    """All rows of a forward, arranged once for all layers."""

    rows: AttentionRows
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


def prepare_attention(rows: AttentionRows, key_cache: Tensor) -> PreparedRows:
    """Arranges rows for `paged_attention` on caches of the shape and dtype of `key_cache`."""
    begins, contexts = rows.query_begins.numpy(), rows.context_lens.numpy()
    counts = np.diff(begins)
    arrange = _Arranger(begins.astype(np.int64), (contexts + counts).astype(np.int64), rows, key_cache)
    return PreparedRows(
        rows,
        decodes=arrange.decode_groups(np.flatnonzero(counts == 1)),
        chunks=[arrange.chunk(int(row)) for row in np.flatnonzero(counts > 1)],
    )


class _Arranger:
    """Builds the parts of `PreparedRows`; `totals` are the tokens that each row's last query sees."""

    def __init__(self, begins: Ints, totals: Ints, rows: AttentionRows, key_cache: Tensor) -> None:
        _, self._num_heads, self._block_size, head_dim = key_cache.shape
        token_bytes = 2 * self._num_heads * head_dim * key_cache.element_size()
        self._group_tokens = GROUP_BYTES // token_bytes
        self._dtype = key_cache.dtype
        self._begins, self._totals = begins, totals
        self._blocks = rows.block_indices.numpy().astype(np.int64)
        self._tables = rows.block_begins.numpy().astype(np.int64)
        self._heads = np.arange(self._num_heads)

    def decode_groups(self, decodes: Ints) -> list[DecodeGroup]:
        """Groups of neighbours in the order of length, of at most GROUP_BYTES where several."""
        ordered = decodes[np.argsort(-self._totals[decodes], kind="stable")]
        groups = []
        while len(ordered):
            longest = int(self._totals[ordered[0]])
            size = max(1, self._group_tokens // longest)
            alike = self._totals[ordered[:size]] >= longest * 3 // 4 - self._block_size
            members = ordered[: int(alike.sum())]  # in descending order, so these come first
            groups.append(self._decode_group(members))
            ordered = ordered[len(members) :]
        return groups

    def _decode_group(self, members: Ints) -> DecodeGroup:
        totals = self._totals[members]
        num_blocks = -(-int(totals[0]) // self._block_size)
        length = num_blocks * self._block_size
        # A row with fewer blocks repeats its first one; `padding` covers what comes from there.
        columns = np.arange(num_blocks)
        own = columns < -(-totals[:, None] // self._block_size)
        tables = self._blocks[self._tables[members][:, None] + np.where(own, columns, 0)]
        hidden = np.arange(length) >= totals[:, None]
        return DecodeGroup(
            queries=torch.from_numpy(self._begins[members]),
            gather=self._gather(tables),
            padding=torch.from_numpy(np.flatnonzero(np.repeat(hidden, self._num_heads, axis=0))),
            mask=self._mask(hidden)[:, None, None, :] if hidden.any() else None,
            length=length,
        )

    def chunk(self, row: int) -> Chunk:
        first, last = int(self._begins[row]), int(self._begins[row + 1])
        total = int(self._totals[row])
        start = int(self._tables[row])
        blocks = self._blocks[start : start + -(-total // self._block_size)]
        context = total - (last - first)
        tiles = [
            self._tile(tile, min(tile + QUERY_TILE, last), context + tile - first)
            for tile in range(first, last, QUERY_TILE)
        ]
        return Chunk(gather=self._gather(blocks[None]), tiles=tiles)

    def _tile(self, first: int, last: int, context: int) -> Tile:
        count = last - first
        num_keys = context + count
        if context == 0:
            return Tile(first, last, num_keys, mask=None)
        hidden = np.arange(num_keys) > context + np.arange(count)[:, None]
        return Tile(first, last, num_keys, mask=self._mask(hidden))

    def _gather(self, tables: Ints) -> Tensor:
        indices = tables[:, None, :] * self._num_heads + self._heads[None, :, None]
        return torch.from_numpy(indices.reshape(-1))

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PreparedRows,
    scale: float,
    form: AttentionForm = PLAIN,
    scales: KvScales | None = None,
) -> Tensor:
    """The same as the reference's, for rows that `prepare_attention` has arranged."""
    if form != PLAIN or scales is not None:  # no CPU serves such a model or cache yet
        return reference.paged_attention(query, key_cache, value_cache, rows.rows, scale, form, scales)
    output = torch.zeros_like(query)
    for group in rows.decodes:
        _attend_decodes(query, key_cache, value_cache, group, scale, output)
    for chunk in rows.chunks:
        _attend_chunk(query, key_cache, value_cache, chunk, scale, output)
    return output


def _attend_decodes(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    scale: float,
    output: Tensor,
) -> None:
    count, (_, num_kv_heads, _, head_dim) = len(group.queries), key_cache.shape
    shape = (count, num_kv_heads, group.length, head_dim)
    # The query heads of a KV head play the part of its queries, so no key is repeated.
    queries = query[group.queries].view(count, num_kv_heads, -1, head_dim)
    keys = _gather_padded(key_cache, group, head_dim).view(shape)
    values = _gather_padded(value_cache, group, head_dim).view(shape)
    attended = F.scaled_dot_product_attention(queries, keys, values, group.mask, scale=scale)
    output[group.queries] = attended.reshape(count, -1, head_dim)


def _gather_padded(cache: Tensor, group: DecodeGroup, head_dim: int) -> Tensor:
    """``[n * num_kv_heads * length, head_dim]``, zero where no query may see: 0 x NaN would spread."""
    gathered = _gather(cache, group.gather).view(-1, head_dim)
    return gathered.index_fill_(0, group.padding, 0.0)


def _gather(cache: Tensor, indices: Tensor) -> Tensor:
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    return cache.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, indices)


def _attend_chunk(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: Chunk, scale: float, output: Tensor
) -> None:
    _, num_kv_heads, _, head_dim = key_cache.shape
    keys = _gather(key_cache, chunk.gather).view(num_kv_heads, 1, -1, head_dim)
    values = _gather(value_cache, chunk.gather).view(num_kv_heads, 1, -1, head_dim)
    for tile in chunk.tiles:
        queries = query[tile.first : tile.last].view(-1, *_grouped(query, num_kv_heads))
        queries = queries.permute(1, 2, 0, 3)  # [num_kv_heads, group, queries, head_dim]
        shape = (num_kv_heads, queries.shape[1], tile.num_keys, head_dim)
        attended = F.scaled_dot_product_attention(
            queries,
            keys[:, :, : tile.num_keys].expand(shape),
            values[:, :, : tile.num_keys].expand(shape),
            tile.mask,
            is_causal=tile.mask is None,
            scale=scale,
        )
        attended = attended.permute(2, 0, 1, 3)
        output[tile.first : tile.last] = attended.reshape(tile.last - tile.first, -1, head_dim)


def _grouped(query: Tensor, num_kv_heads: int) -> tuple[int, int, int]:
    _, num_heads, head_dim = query.shape
    return num_kv_heads, num_heads // num_kv_heads, head_dim
