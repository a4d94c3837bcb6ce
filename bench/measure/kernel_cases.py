"""Every operation of the kernels' table at the sizes of a model, with what it must read and compute."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference.rotary import inverse_frequencies, rotary_table
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.rows import AttentionRows
from octavo.kernels.table import Kernels

_FLOAT = 4  # bytes
# A model's layers take turns, so that none finds its weights or its KV in a cache: so do the cases.
_ROTATE_BYTES = 192 << 20


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model of the Llama family."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Sizes":
        """From Hugging Face's configuration."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            layers=config["num_hidden_layers"],
        )


@dataclass(frozen=True)
class Load:
    """How much the cases do."""

    batches: Sequence[int]  # sequences that decode
    context: int  # tokens of each
    prefill: int  # tokens of a chunk
    block_size: int


@dataclass(frozen=True)
class Case:
    """One operation at one size; `run` gets 0, 1, 2, ... and may use other memory for each."""

    operation: str
    size: str
    run: Callable[[int], object]
    bytes: int  # read and written at least
    flops: int = 0


def cases(kernels: Kernels, sizes: Sizes, load: Load) -> Iterator[Case]:
    """Made one at a time, so that the memory of one is free before the next."""
    for count in load.batches:
        yield from _attention(kernels, sizes, load, [1] * count, [load.context - 1] * count)
    yield from _attention(kernels, sizes, load, [load.prefill], [0])
    for tokens in (*load.batches, load.prefill):
        yield from _writes(kernels, sizes, load, tokens)
        yield from _linears(kernels, sizes, tokens)
        yield from _pointwise(kernels, sizes, tokens)
    yield from _blocks(kernels, sizes, load)
    for count in load.batches:
        yield from _sampling(kernels, sizes, count)


def _copies(size: int) -> int:
    return max(1, -(-_ROTATE_BYTES // size))


def _pool(sizes: Sizes, num_blocks: int, block_size: int) -> Tensor:
    return torch.randn(num_blocks, sizes.kv_heads, block_size, sizes.head_dim)


def _rows(counts: Sequence[int], contexts: Sequence[int], block_size: int) -> AttentionRows:
    """Rows with shuffled block tables."""
    totals = [count + context for count, context in zip(counts, contexts, strict=True)]
    blocks = [-(-total // block_size) for total in totals]
    return AttentionRows(
        query_begins=_begins(counts),
        context_lens=torch.tensor(contexts),
        block_indices=torch.randperm(sum(blocks)),
        block_begins=_begins(blocks),
    )


def _begins(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def _attention(
    kernels: Kernels, sizes: Sizes, load: Load, counts: Sequence[int], contexts: Sequence[int]
) -> Iterator[Case]:
    rows = _rows(counts, contexts, load.block_size)
    num_blocks, queries = len(rows.block_indices), sum(counts)
    pool_bytes = num_blocks * load.block_size * sizes.kv_heads * sizes.head_dim * _FLOAT
    pools = [_pool(sizes, num_blocks, load.block_size) for _ in range(2 * _copies(2 * pool_bytes))]
    query = torch.randn(queries, sizes.heads, sizes.head_dim)
    prepared = kernels.prepare_attention(rows, pools[0])
    scale = sizes.head_dim**-0.5
    pairs = list(zip(counts, contexts, strict=True))
    attended = sum(count * context + count * (count + 1) // 2 for count, context in pairs)
    cached = sum(count + context for count, context in pairs)
    size = f"{queries} x {load.context}" if counts[0] == 1 else f"prefill {queries}"

    def attend(turn: int) -> Tensor:
        pair = 2 * turn % len(pools)
        return kernels.paged_attention(query, pools[pair], pools[pair + 1], prepared, scale)

    moved = 2 * cached * sizes.kv_heads * sizes.head_dim + 2 * query.numel()
    flops = 4 * attended * sizes.heads * sizes.head_dim
    yield Case("paged_attention", size, attend, moved * _FLOAT, flops)
    yield Case("prepare_attention", size, lambda _: kernels.prepare_attention(rows, pools[0]), 0)


def _writes(kernels: Kernels, sizes: Sizes, load: Load, tokens: int) -> Iterator[Case]:
    num_blocks = max(64, -(-tokens // load.block_size))
    keys, values = (_pool(sizes, num_blocks, load.block_size) for _ in range(2))
    slots = torch.randperm(num_blocks * load.block_size)[:tokens]
    prepared = kernels.prepare_kv_write(slots, keys)
    heads = torch.randn(tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    new_keys, new_values = torch.randn(2, tokens, sizes.kv_heads, sizes.head_dim)
    rotations = rotary_table(inverse_frequencies(sizes.head_dim, 10_000.0), tokens)
    size = _tokens(tokens)
    written = 2 * new_keys.numel()

    def write(_: int) -> None:
        kernels.kv_write(new_keys, new_values, keys, values, prepared)

    def rotate_and_write(_: int) -> Tensor:
        return kernels.rotary_kv_write(heads, rotations, keys, values, prepared)

    yield Case("prepare_kv_write", size, lambda _: kernels.prepare_kv_write(slots, keys), 0)
    yield Case("kv_write", size, write, 2 * written * _FLOAT)
    moved = (2 * heads.numel() + rotations.numel()) * _FLOAT
    yield Case("rotary_kv_write", size, rotate_and_write, moved)


def _linears(kernels: Kernels, sizes: Sizes, tokens: int) -> Iterator[Case]:
    yield _linear(kernels, "gate and up", tokens, sizes.hidden, 2 * sizes.intermediate)
    yield _linear(kernels, "down", tokens, sizes.intermediate, sizes.hidden)
    yield _linear(kernels, "head", tokens, sizes.hidden, sizes.vocab)


def _linear(kernels: Kernels, name: str, tokens: int, in_size: int, out_size: int) -> Case:
    count = _copies(in_size * out_size * _FLOAT)
    weights = [kernels.prepare_linear(torch.randn(out_size, in_size)) for _ in range(count)]
    hidden = torch.randn(tokens, in_size)
    moved = (in_size * out_size + tokens * (in_size + out_size)) * _FLOAT
    return Case(
        operation="linear",
        size=f"{name}, {_tokens(tokens)}",
        run=lambda turn: kernels.linear(hidden, weights[turn % count], None),
        bytes=moved,
        flops=2 * tokens * in_size * out_size,
    )


def _pointwise(kernels: Kernels, sizes: Sizes, tokens: int) -> Iterator[Case]:
    hidden, residual = torch.randn(2, tokens, sizes.hidden)
    weight = torch.ones(sizes.hidden)
    gate_up = torch.randn(tokens, 2 * sizes.intermediate)
    heads = torch.randn(tokens, sizes.heads + sizes.kv_heads, sizes.head_dim)
    rotations = rotary_table(inverse_frequencies(sizes.head_dim, 10_000.0), tokens)
    size, each = _tokens(tokens), hidden.numel() * _FLOAT
    yield Case("rms_norm", size, lambda _: kernels.rms_norm(hidden, weight, 1e-5), 2 * each)
    yield Case(
        "add_rms_norm",
        size,
        lambda _: kernels.add_rms_norm(hidden, residual, weight, 1e-5),
        4 * each,
    )
    yield Case("silu_mul", size, lambda _: kernels.silu_mul(gate_up), gate_up.numel() * 3 // 2 * _FLOAT)
    rotated = (2 * heads.numel() + rotations.numel()) * _FLOAT
    yield Case("rotary", size, lambda _: kernels.rotary(heads, rotations), rotated)


def _blocks(kernels: Kernels, sizes: Sizes, load: Load) -> Iterator[Case]:
    """Copy-on-write and swap of some blocks, over the pools of all layers."""
    pairs, num_blocks = 16, 64
    here, there = (
        [_pool(sizes, num_blocks, load.block_size) for _ in range(2 * sizes.layers)] for _ in range(2)
    )
    ids = torch.randperm(num_blocks)
    sources, destinations = ids[:pairs], ids[pairs : 2 * pairs]
    gathered = kernels.block_gather(here, sources)
    moved = 2 * pairs * sum(pool[0].numel() for pool in here) * _FLOAT
    size = f"{pairs} blocks of {load.block_size}, {sizes.layers} layers"
    yield Case("block_copy", size, lambda _: kernels.block_copy(here, sources, destinations), moved)
    yield Case("block_gather", size, lambda _: kernels.block_gather(here, sources), moved)
    yield Case(
        "block_scatter", size, lambda _: kernels.block_scatter(gathered, there, destinations), moved
    )
    yield Case(
        "block_swap", size, lambda _: kernels.block_swap(here, there, sources, destinations), moved
    )


def _sampling(kernels: Kernels, sizes: Sizes, rows: int) -> Iterator[Case]:
    logits = 3 * torch.randn(rows, sizes.vocab)
    read, size = logits.numel() * _FLOAT, f"{rows} rows of {sizes.vocab}"

    def drawing(name: str, temperature: float, top_p: float) -> Case:
        params = _params(rows, temperature, top_p)
        return Case("sample", f"{name}, {size}", lambda _: kernels.sample(logits, params), read)

    yield Case("argmax", size, lambda _: kernels.argmax(logits), read)
    yield drawing("greedy", 0.0, 1.0)
    yield drawing("top-p 0.9", 1.0, 0.9)
    yield drawing("no limit", 1.0, 1.0)
    yield Case("log_normalizer", size, lambda _: kernels.log_normalizer(logits), read)
    yield Case("top_ids", f"20 of {size}", lambda _: kernels.top_ids(logits, 20), read)


def _params(rows: int, temperature: float, top_p: float) -> DrawParams:
    return DrawParams(
        temperature=torch.full((rows,), temperature),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
        min_p=torch.zeros(rows, dtype=torch.float64),
        seeds=torch.arange(rows),
        positions=torch.full((rows,), 7),
        samples=torch.zeros(rows, dtype=torch.int64),
    )


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"
