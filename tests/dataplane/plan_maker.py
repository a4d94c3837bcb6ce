"""Drives a runner the way a control plane does, with permuted block tables."""

from typing import Any

import numpy as np
import torch

from octavo.dataplane.engine import Engine
from octavo.dataplane.runner import Runner
from octavo.dataplane.slots import Slots
from octavo.kernels.table import CPU
from octavo.proto.plan import Admit, Admits, Plan, Result, Sampling
from octavo.proto.wire import int32s

GREEDY = Sampling(temperature=0.0)


class PlanMaker:
    """Numbers plans, gives out blocks in a permuted order, and runs the plans' bytes."""

    def __init__(
        self,
        engine: Engine,
        block_size: int = 4,
        num_blocks: int = 64,
        num_slots: int = 8,
        max_model_len: int = 256,
        vocab_size: int = 300,
        seed: int = 5,
    ) -> None:
        engine.make_pools(num_blocks, block_size, 16)
        self.slots = Slots(num_slots, max_model_len, block_size, vocab_size)
        self.runner = Runner(engine, CPU, self.slots, max_batched_tokens=4096)
        self.block_size = block_size
        self._sizes = (num_slots, num_blocks, 16)
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._next = 0

    def run(self, **parts: Any) -> Result:
        """Runs one plan, through its bytes."""
        return self.runner.run(self.plan(**parts), rank=0)

    def plan(self, **parts: Any) -> Plan:
        """The next plan, through its bytes."""
        arrays: dict[str, Any] = {
            name: Admits.of(part) if name == "admits" else int32s(part) for name, part in parts.items()
        }
        plan = Plan.unpack(Plan(epoch=1, number=self._next, **arrays).pack())
        self._next += 1
        plan.validate(*self._sizes)
        return plan

    def blocks(self, tokens: int) -> list[int]:
        """Blocks for so many tokens."""
        return [self._free.pop() for _ in range(-(-tokens // self.block_size))]

    def admit(
        self, slot: int, tokens: list[int], room: int, sampling: Sampling = GREEDY, **given: Any
    ) -> Admit:
        """An admission with blocks for `room` tokens."""
        blocks = given.pop("blocks", None) or self.blocks(room)
        values: dict[str, Any] = {"prompt_len": len(tokens), "computed": 0, "sample": 0} | given
        return Admit(
            slot=slot, tokens=int32s(tokens), blocks=int32s(blocks), sampling=sampling, **values
        )

    def prefill(self, *admits: Admit) -> Result:
        """Admits and computes whole prompts; draws one token for each."""
        return self.run(
            admits=list(admits),
            chunk_slots=[a.slot for a in admits],
            chunk_lengths=[len(a.tokens) - a.computed for a in admits],
            draw_slots=[a.slot for a in admits],
            draw_chunks=range(len(admits)),
        )

    def decode(self, slots: list[int], count: int) -> list[list[int]]:
        """`count` decode steps of several slots: the tokens of each slot."""
        steps = [self.run(decode_slots=slots).tokens.tolist() for _ in range(count)]
        return [list(column) for column in zip(*steps, strict=True)]


def distribution(result: Result, draw: int) -> torch.Tensor:
    """All log-probabilities of a draw that asked for the whole vocabulary, by token id."""
    found = result.draw_logprobs
    assert found is not None
    index = found.draws.tolist().index(draw)
    begin = int(found.top_counts[:index].sum())
    part = slice(begin, begin + int(found.top_counts[index]))
    values = torch.empty(len(found.top_ids[part]))
    values[torch.from_numpy(found.top_ids[part].astype(np.int64))] = torch.tensor(
        found.top_logprobs[part]
    )
    return values
