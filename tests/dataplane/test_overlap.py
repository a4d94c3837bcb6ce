"""A plan is started while the one before it is under way: the host sees its tokens only later.

CPUs compute at once, so an engine here only says that it overlaps; the runner then treats tokens as it
does on a GPU: known to the device, not to the host.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from plan_maker import GREEDY, PlanMaker
from tiny_llama import prompt_of

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.runner import UnderWay
from octavo.proto.plan import Plan, Result, Sampling

SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=11)


class OverlappingEngine(TorchEngine):
    @property
    def overlaps(self) -> bool:
        return True


@pytest.fixture
def maker(model_folder: Path) -> PlanMaker:
    return PlanMaker(OverlappingEngine(open_model(str(model_folder)), "cpu", "float32"))


@pytest.fixture
def plain(engine: TorchEngine) -> PlanMaker:
    return PlanMaker(engine)


class Pipeline:
    """Keeps one plan under way, as the worker's loop does."""

    def __init__(self, maker: PlanMaker) -> None:
        self._maker = maker
        self._started: UnderWay | None = None
        self.results: list[Result] = []
        self.overlapped = 0

    def push(self, plan: Plan) -> None:
        if self._started is not None and not self._maker.runner.can_start(plan):
            self.drain()
        started = self._maker.runner.start(plan)
        self.overlapped += self._started is not None
        self.drain()
        self._started = started

    def drain(self) -> None:
        if self._started is not None:
            self.results.append(self._maker.runner.finish(self._started, 0))
            self._started = None

    def tokens(self) -> list[list[int]]:
        self.drain()
        return [result.tokens.tolist() for result in self.results]


def prefill(maker: PlanMaker, sampling: Sampling) -> Plan:
    admits = [maker.admit(slot, prompt_of(5 + slot, slot), 40, sampling) for slot in range(3)]
    return maker.plan(
        admits=admits,
        chunk_slots=range(3),
        chunk_lengths=[5, 6, 7],
        draw_slots=range(3),
        draw_chunks=range(3),
    )


def plans(maker: PlanMaker, sampling: Sampling) -> list[Callable[[], Plan]]:
    decode = [lambda: maker.plan(decode_slots=[2, 0, 1]) for _ in range(6)]
    return [lambda: prefill(maker, sampling), *decode]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_overlapped_plans_draw_the_same_tokens(
    maker: PlanMaker, plain: PlanMaker, sampling: Sampling
) -> None:
    wanted = [plain.runner.run(make(), 0).tokens.tolist() for make in plans(plain, sampling)]
    pipeline = Pipeline(maker)
    for make in plans(maker, sampling):
        pipeline.push(make())
    assert pipeline.tokens() == wanted
    assert pipeline.overlapped == 6
    assert not maker.slots.late.any()
    history = [maker.slots.history(slot).tolist() for slot in range(3)]
    assert history == [plain.slots.history(slot).tolist() for slot in range(3)]


def test_what_depends_on_the_host_knowing_a_token_waits(maker: PlanMaker, plain: PlanMaker) -> None:
    penalized = Sampling(temperature=0.0, repetition_penalty=1.5)
    wanted = [plain.runner.run(make(), 0).tokens.tolist() for make in plans(plain, penalized)]
    pipeline = Pipeline(maker)
    for make in plans(maker, penalized):
        pipeline.push(make())
    assert pipeline.tokens() == wanted
    assert pipeline.overlapped == 0


def test_a_late_token_of_a_freed_slot_is_not_given_to_its_next_sequence(
    maker: PlanMaker, plain: PlanMaker
) -> None:
    def again(maker: PlanMaker) -> Plan:
        admit = maker.admit(0, prompt_of(9, 4), 40, GREEDY)
        return maker.plan(
            free_slots=[0],
            admits=[admit],
            decode_slots=[1],
            chunk_slots=[0],
            chunk_lengths=[9],
            draw_slots=[0],
            draw_chunks=[0],
        )

    made: list[Callable[[PlanMaker], Plan]] = [
        lambda maker: prefill(maker, GREEDY),
        lambda maker: maker.plan(decode_slots=[0, 1]),
        again,
        lambda maker: maker.plan(decode_slots=[1, 0]),
    ]
    wanted = [plain.runner.run(make(plain), 0).tokens.tolist() for make in made]
    pipeline = Pipeline(maker)
    for make in made:
        pipeline.push(make(maker))
    assert pipeline.tokens() == wanted
    assert pipeline.overlapped == 3
    assert maker.slots.history(0).tolist() == plain.slots.history(0).tolist()
