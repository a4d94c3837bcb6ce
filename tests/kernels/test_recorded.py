"""Runs of native operations that are recorded compute what the operations called one by one do."""

from collections.abc import Callable
from threading import Thread
from weakref import ref

import pytest
import torch
from kernel_inputs import begins
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu.recorded import Program, record
from octavo.kernels.recording import Brought, RecordingError
from octavo.kernels.rows import AttentionRows

SIZE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 24, 3, 1, 8, 4
Run = Callable[[Brought], tuple[Tensor, ...]]


def chance(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """Every operation once, in caches of its own."""

    def __init__(self) -> None:
        self.keys, self.values = torch.zeros(2, 12, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.norm = chance(SIZE, seed=1)
        self.qkv = native.prepare_linear(chance((HEADS + 2 * KV_HEADS) * HEAD_DIM, SIZE, seed=2))
        self.bias = chance((HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=3)
        self.up = native.prepare_linear(chance(2 * SIZE, HEADS * HEAD_DIM, seed=4))

    def __call__(self, brought: Brought) -> tuple[Tensor, ...]:
        normed = native.rms_norm(brought.hidden, self.norm, 1e-5)
        heads = native.linear(normed, self.qkv, self.bias).view(len(normed), -1, HEAD_DIM)
        slots = brought.kv_slots
        query = native.rotary_kv_write(heads, brought.rotations[0], self.keys, self.values, slots)
        attended = native.paged_attention(query, self.keys, self.values, brought.rows, 0.3)
        gated = native.silu_mul(native.linear(attended.flatten(1), self.up, None))
        return native.add_rms_norm(gated, brought.hidden, self.norm, 1e-5)

    def brings(self, counts: list[int], seed: int = 0) -> Brought:
        """A forward of rows of that many queries without a context, each in blocks of its own."""
        tokens, blocks = sum(counts), [-(-count // BLOCK_SIZE) for count in counts]
        rows = AttentionRows(begins(counts), torch.zeros(len(counts)), torch.arange(12), begins(blocks))
        slots = torch.cat(
            [
                torch.arange(count) + BLOCK_SIZE * first
                for count, first in zip(counts, begins(blocks).tolist(), strict=False)
            ]
        )
        return Brought(
            chance(tokens, SIZE, seed=seed),
            [chance(tokens, HEAD_DIM, seed=seed + 1)],
            native.prepare_attention(rows, self.keys),
            native.prepare_kv_write(slots, self.keys),
        )


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


def recorded(run: Run, brought: Brought) -> Program:
    return record(lambda: run(brought), brought)


def test_any_mix_of_rows_has_the_bits_of_the_calls(layer: Layer) -> None:
    program = recorded(layer, layer.brings([5, 2]))
    for seed, counts in enumerate(([5, 2], [1], [1, 1, 1], [17, 1, 9], [4] * 7)):
        brought = layer.brings(counts, seed)
        found = []
        for run in (layer, program.run):
            layer.keys.zero_()
            layer.values.zero_()
            found.append([*run(brought), layer.keys.clone(), layer.values.clone()])
        assert found[0][2].any()
        assert all(map(torch.equal, *found))


def test_intermediates_share_the_space_of_those_that_were_read(layer: Layer) -> None:
    weights = [native.prepare_linear(chance(SIZE, SIZE, seed=seed)) for seed in range(9)]

    def chain(brought: Brought) -> tuple[Tensor, ...]:
        hidden = brought.hidden
        for weight in weights:
            hidden = native.linear(hidden, weight, None)
        return (hidden,)

    brought = layer.brings([7])
    program = recorded(chain, brought)
    assert program.arena_bytes == 2 * 128  # two vectors of 96 bytes, each from a 64th byte on
    assert torch.equal(program.run(brought)[0], chain(brought)[0])


def test_results_are_the_callers(layer: Layer) -> None:
    program, first = recorded(layer, layer.brings([7])), layer.brings([3], seed=5)
    results = program.run(first)
    kept = [result.clone() for result in results]
    program.run(layer.brings([3], seed=6))
    assert all(map(torch.equal, results, kept))


def test_what_a_program_reads_is_not_freed_and_intermediates_are() -> None:
    layer, intermediates = Layer(), []

    def run(brought: Brought) -> tuple[Tensor, ...]:
        results = layer(brought)
        intermediates.extend(map(ref, results))
        return results

    brought = layer.brings([7])
    program = recorded(run, brought)
    kept = [
        ref(part) for part in (layer.norm, layer.qkv, layer.bias, layer.up, layer.keys, layer.values)
    ]
    layer = Layer()
    del brought
    assert all(part() is not None for part in kept)
    assert [part() for part in intermediates] == [None, None]
    del program
    assert [part() for part in kept] == [None] * len(kept)


def test_other_threads_are_not_recorded(layer: Layer) -> None:
    def run(brought: Brought) -> tuple[Tensor, ...]:
        other = Thread(target=layer, args=(layer.brings([2]),))
        other.start()
        other.join()
        return layer(brought)

    brought = layer.brings([7])
    assert len(recorded(run, brought).words) == len(recorded(layer, brought).words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layer, b: (native.rms_norm(b.hidden * 2, layer.norm, 1e-5),),
            "0, norm, reads what torch",
        ),
        (lambda layer, b: tuple(part + 1 for part in layer(b)), "no operation computed the result"),
        (lambda layer, b: (b.hidden,), "no operation computed the result"),
        (lambda layer, b: (layer(b)[0][:, :8],), "no operation computed the result"),
        (lambda layer, b: layer(b)[:1] * 2, "are the same"),
        (lambda layer, b: layer(layer.brings([7])), "reads what torch"),
        (
            lambda layer, b: (native.rms_norm(b.hidden, layer(b)[0][0], 1e-5),),
            "takes what changes for a constant",
        ),
        (
            lambda layer, b: (native.rms_norm(b.hidden[:3].clone(), layer.norm, 1e-5),),
            "no multiple of 7 tokens",
        ),
    ],
)
def test_what_would_not_repeat_is_refused(
    layer: Layer, change: Callable[[Layer, Brought], tuple[Tensor, ...]], message: str
) -> None:
    with pytest.raises(RecordingError, match=message):
        recorded(lambda brought: change(layer, brought), layer.brings([7]))
