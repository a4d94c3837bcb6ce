"""Broken frames on a worker's sockets: it refuses them, lives on, and computes what it should."""

import random

import pytest
from controlplane_side import ControlPlaneSide, WorkerProcess, reset_message
from fuzzing import frames, mutated_frame
from tiny_llama import prompt_of

from octavo.proto.plan import Admit, Admits, Fault, Plan, Result, Sampling
from octavo.proto.session import Ready, Register, control_identity
from octavo.proto.wire import int32s

COUNTS = [1_000, pytest.param(100_000, marks=pytest.mark.full)]


@pytest.fixture(scope="module", autouse=True)
def registered(side: ControlPlaneSide, worker: WorkerProcess) -> None:
    side.receive(Register)


def plan(epoch: int) -> Plan:
    """A prompt of six tokens, and the first token after it."""
    admit = Admit(
        slot=2,
        tokens=int32s(prompt_of(6)),
        prompt_len=6,
        computed=0,
        blocks=int32s([17, 3]),
        sample=0,
        sampling=Sampling(temperature=0.0),
    )
    return Plan(
        epoch=epoch,
        number=0,
        admits=Admits.of([admit]),
        chunk_slots=int32s([2]),
        chunk_lengths=int32s([6]),
        draw_slots=int32s([2]),
        draw_chunks=int32s([0]),
    )


def answer(side: ControlPlaneSide, epoch: int) -> list[int]:
    """What the worker says to a good plan in a new epoch."""
    reset(side, epoch)
    side.data(plan(epoch).pack())
    result = side.receive(Result)
    tokens: list[int] = result.tokens.tolist()
    return tokens


def reset(side: ControlPlaneSide, epoch: int) -> None:
    """Begins an epoch; what the worker says of mutated plans comes before that."""
    side.control(reset_message(side.incarnation, epoch))
    while not (isinstance(said := side.receive(Ready, Result, Fault), Ready) and said.epoch == epoch):
        continue


@pytest.mark.parametrize("count", COUNTS)
def test_frames_that_are_not_of_the_epoch(
    side: ControlPlaneSide, worker: WorkerProcess, count: int
) -> None:
    rng = random.Random(count)
    expected = answer(side, 100 + count)
    epoch = 101 + count
    reset(side, epoch)
    stale = [plan(1).pack()]
    # All sizes are wrong, so that it stays impossible whatever becomes of some.
    sizes = ("block_size", "num_slots", "num_blocks", "max_batched_tokens", "max_model_len")
    impossible = reset_message(side.incarnation, 1, **dict.fromkeys(sizes, 0)).pack()
    for parts in frames(rng, stale, count):
        side.data(*parts)
    for parts in frames(rng, [impossible], count):
        side.frames(control_identity(side.worker), *parts)
    side.data(plan(epoch).pack())
    assert side.receive(Result).tokens.tolist() == expected
    assert worker.process.poll() is None
    assert worker.log().count("refused a frame") < count / 10  # one line a second


@pytest.mark.parametrize("count", [60, pytest.param(5_000, marks=pytest.mark.full)])
def test_plans_of_the_epoch_that_are_wrong(
    side: ControlPlaneSide, worker: WorkerProcess, count: int
) -> None:
    """Whatever a wrong plan does, the next reset ends it."""
    rng = random.Random(count)
    base = 10_000_000 + count * 1000
    expected = answer(side, base)
    for epoch in range(base + 1, base + 1 + count):
        reset(side, epoch)
        side.data(mutated_frame(rng, plan(epoch).pack()))
    assert answer(side, base + count + 1) == expected
    assert worker.process.poll() is None
