"""Drives a worker's runner with plans of its own, as a control plane would, without sockets."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from measure.engines import device_of
from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.engine import Engine
from octavo.dataplane.runner import Runner
from octavo.dataplane.slots import Slots
from octavo.kernels.table import kernels_for
from octavo.proto.plan import Admit, Admits, Plan, Sampling
from octavo.proto.wire import Int32s, int32s

_FIRST_PLAIN_TOKEN = 20  # special tokens come before


@dataclass(frozen=True)
class Shape:
    """The room that a stepper makes."""

    sequences: int
    max_tokens: int  # of a sequence, prompt and outputs
    block_size: int  # tokens

    @property
    def blocks_each(self) -> int:
        """Blocks of a sequence."""
        return -(-self.max_tokens // self.block_size)


class Stepper:
    """A runner on `engine` with pools for `shape`, whose sequences have shuffled block tables."""

    def __init__(self, files: ModelFiles, engine: Engine, shape: Shape, seed: int) -> None:
        self._engine = engine
        self._engine.make_pools(shape.sequences * shape.blocks_each, shape.block_size, 0)
        self._engine.warm_up(shape.sequences)
        self._vocab = int(files.config["vocab_size"])
        slots = Slots(shape.sequences, shape.max_tokens, shape.block_size, self._vocab)
        self._runner = Runner(self._engine, kernels_for(device_of(engine)), slots, shape.max_tokens)
        self._rng = np.random.default_rng(seed)
        shuffled = self._rng.permutation(shape.sequences * shape.blocks_each)
        self._tables: Int32s = int32s(shuffled).reshape(shape.sequences, shape.blocks_each)
        self._number = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token, all layers."""
        return self._engine.describe().token_bytes

    def prefill(self, tokens: int) -> float:
        """Seconds to compute a fresh prompt in slot 0 as one chunk and to draw its next token."""
        return self._run(
            admits=Admits.of([self._admit(0, self._random(tokens), computed=0)]),
            chunk_slots=int32s([0]),
            chunk_lengths=int32s([tokens]),
            draw_slots=int32s([0]),
            draw_chunks=int32s([0]),
        )

    def spread(self, sequences: int, tokens: int) -> None:
        """Gives slots 0 .. sequences - 1 a context of `tokens` tokens, each in blocks of its own.

        One prompt is computed and its blocks are copied: real values, in the time of one prefill.
        """
        self.prefill(tokens)
        targets = self._tables[1:sequences]
        sources = np.broadcast_to(self._tables[0], targets.shape)
        context = self._random(tokens + 1)
        self._run(
            copies=int32s(np.stack([sources, targets], axis=-1).ravel()),
            admits=Admits.of(
                [self._admit(slot, context, computed=tokens) for slot in range(1, sequences)]
            ),
        )

    def decode(self, sequences: int) -> float:
        """Seconds of one step in which each of the first slots computes and draws a token."""
        return self._run(decode_slots=int32s(range(sequences)))

    def _admit(self, slot: int, tokens: Int32s, computed: int) -> Admit:
        return Admit(
            slot=slot,
            tokens=tokens,
            prompt_len=len(tokens),
            computed=computed,
            blocks=self._tables[slot],
            sample=0,
            sampling=Sampling(temperature=0.0, ignore_eos=True),
        )

    def _random(self, count: int) -> Int32s:
        return int32s(self._rng.integers(_FIRST_PLAIN_TOKEN, self._vocab, count))

    def _run(self, **parts: Any) -> float:
        plan = Plan(epoch=1, number=self._number, **parts)
        self._number += 1
        started = time.perf_counter()
        self._runner.run(plan, rank=0)
        return time.perf_counter() - started
