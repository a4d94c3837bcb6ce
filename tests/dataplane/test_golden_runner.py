"""The demo model through the runner gives exactly the reference's tokens."""

from typing import Any

import pytest
from plan_maker import PlanMaker
from shared_files import golden

from octavo.common.modelfiles import open_model
from octavo.dataplane.engine import Engine
from octavo.dataplane.engines.choice import with_activations
from octavo.dataplane.engines.openvino.engine import OpenVinoEngine
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.kernels.table import kernels_named
from octavo.proto.plan import Sampling

EOS = 2


@pytest.fixture(scope="module")
def demo() -> TorchEngine:
    return TorchEngine(open_model("demo"), "cpu", "float32")


@pytest.fixture(scope="module")
def exact4() -> OpenVinoEngine:
    return OpenVinoEngine(open_model("demo"), "exact4", "float32", threads=2)


def check(
    engine: Engine, cases: list[dict[str, Any]], block_size: int, chunk: int, error: float = 1e-3
) -> None:
    """All cases at once: prompts in chunks, joining while others decode.

    Args:
        error: largest of a log-probability.
    """
    maker = PlanMaker(engine, block_size, 4096 // block_size, len(cases), 1024, vocab_size=49_152)
    sampling = Sampling(temperature=0.0, logprobs=0)
    found: list[list[int]] = [[] for _ in cases]
    logprobs: list[list[float]] = [[] for _ in cases]
    decoding: list[int] = []
    waiting = list(range(len(cases)))
    while waiting or decoding:
        admits, rows, draws = [], [], []
        if waiting:
            slot, prompt = waiting[0], cases[waiting[0]]["prompt_token_ids"]
            if not maker.slots.live[slot]:
                admits = [maker.admit(slot, prompt, len(prompt) + 64, sampling)]
                done = 0
            size = min(chunk, len(prompt) - done)
            rows, done = [(slot, size)], done + size
            if done == len(prompt):
                draws = [waiting.pop(0)]
        result = maker.run(
            admits=admits,
            decode_slots=decoding,
            chunk_slots=[slot for slot, _ in rows],
            chunk_lengths=[size for _, size in rows],
            draw_slots=draws,
            draw_chunks=[0] * len(draws),
        )
        scores = result.draw_logprobs.logprobs.tolist() if result.draw_logprobs else []
        for index, slot in enumerate([*decoding, *draws]):
            found[slot].append(int(result.tokens[index]))
            logprobs[slot].append(scores[index])
        decoding += draws
        decoding = [s for s in decoding if len(found[s]) < 64 and found[s][-1] != EOS]
    assert found == [case["output_token_ids"] for case in cases]
    for its, case in zip(logprobs, cases, strict=True):
        assert its == pytest.approx(case["logprobs"], abs=error)


def test_two_prompts_together(demo: TorchEngine) -> None:
    cases = golden("greedy")
    check(demo, [cases[0], cases[-1]], block_size=16, chunk=16)


@pytest.mark.full
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [16, 512])
def test_all_prompts_together(demo: TorchEngine, block_size: int, chunk: int) -> None:
    check(demo, golden("greedy"), block_size, chunk)


@pytest.mark.full
def test_all_prompts_one_by_one(demo: TorchEngine) -> None:
    for case in golden("greedy"):
        check(demo, [case], block_size=16, chunk=16)


def test_all_prompts_with_kept_4_bit_weights(exact4: OpenVinoEngine) -> None:
    check(exact4, golden("greedy"), block_size=32, chunk=64)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [13, 512])
def test_all_prompts_with_kept_4_bit_weights_in_other_chunks(
    exact4: OpenVinoEngine, chunk: int
) -> None:
    check(exact4, golden("greedy"), block_size=32, chunk=chunk)


@pytest.mark.full
def test_all_prompts_with_float32_weights_in_openvino() -> None:
    engine = OpenVinoEngine(open_model("demo"), "none", "float32", threads=2)
    check(engine, golden("greedy"), block_size=32, chunk=64)
    check(engine, golden("greedy"), block_size=32, chunk=13)


def test_activations_in_16_bits_change_no_token() -> None:
    kernels = with_activations(kernels_named("native", "cpu"), "int16")
    engine = TorchEngine(open_model("demo"), "cpu", "float32", kernels, packing="exact4")
    check(engine, golden("greedy"), block_size=16, chunk=16, error=5e-3)
