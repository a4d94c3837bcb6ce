"""The Triton kernels in the interpreter, end to end: a real worker process against the reference."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from controlplane_side import ControlPlaneSide, WorkerProcess
from tiny_llama import VOCAB, prompt_of, save_tiny_llama, tiny_llama

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.runner import Runner
from octavo.dataplane.slots import Slots
from octavo.kernels.table import REFERENCE
from octavo.proto.plan import Admit, Admits, Plan, Result, Sampling
from octavo.proto.session import Register
from octavo.proto.wire import int32s

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, seed=7, top_k=40, top_p=0.9, min_p=0.01, logprobs=2)
BLOCKS = {0: [17, 3, 30, 8], 1: [21, 5, 11, 2], 2: [9, 26, 14, 1]}  # permuted, of 4 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; three query heads for each KV head, so that groups are odd."""
    model = tiny_llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    return save_tiny_llama(model, tmp_path_factory.mktemp("models") / "grouped-llama")


@pytest.fixture(scope="module")
def worker(
    side: ControlPlaneSide, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        worker = WorkerProcess(
            tmp_path_factory.mktemp("logs"),
            model=str(folder),
            worker_port=side.port,
            num_kv_blocks=32,
            engine="torch",
            kernels="triton",
        )
    yield worker
    worker.close()


def admit(slot: int, length: int, sampling: Sampling, computed: int = 0) -> Admit:
    return Admit(
        slot=slot,
        tokens=int32s(prompt_of(length, slot)),
        prompt_len=length,
        computed=computed,
        blocks=int32s(BLOCKS[slot]),
        sample=0,
        sampling=sampling,
    )


def chunks(*pairs: tuple[int, int]) -> dict[str, object]:
    slots, lengths = zip(*pairs, strict=True)
    return {"chunk_slots": int32s(slots), "chunk_lengths": int32s(lengths)}


def draws(*pairs: tuple[int, int]) -> dict[str, object]:
    slots, indices = zip(*pairs, strict=True)
    return {"draw_slots": int32s(slots), "draw_chunks": int32s(indices)}


def plans(epoch: int) -> list[Plan]:
    """Chunks and decodes mixed, a fork with copy-on-write, a swap out and in, log-probabilities."""
    two = {"decode_slots": int32s([0, 1])}
    parts: list[dict[str, object]] = [
        {"admits": Admits.of([admit(0, 9, GREEDY)]), **chunks((0, 4))},
        {
            "admits": Admits.of([admit(1, 5, SAMPLED)]),
            **chunks((0, 5), (1, 5)),
            **draws((0, 0), (1, 1)),
        },
        {"admits": Admits.of([admit(2, 11, SAMPLED)]), **two, **chunks((2, 6))},
        {**two, **chunks((2, 5)), **draws((2, 0))},
        # Slot 3 goes on from slot 1, whose second block is shared and copied.
        {
            "copies": int32s([5, 31]),
            "forks": int32s([1, 3, 1]),
            "table_slots": int32s([3]),
            "table_indices": int32s([1]),
            "table_blocks": int32s([31]),
            "decode_slots": int32s([0, 1, 2, 3]),
        },
        {"swap_out": int32s([9, 0, 26, 2, 14, 1, 1, 3]), **two},
        {"swap_in": int32s([0, 9, 2, 26, 1, 14, 3, 1]), "decode_slots": int32s([2, 0, 1])},
        {"decode_slots": int32s([2, 0])},
    ]
    return [Plan(epoch=epoch, number=number, **part) for number, part in enumerate(parts)]  # type: ignore[arg-type]


def reference_results(folder: Path) -> list[Result]:
    engine = TorchEngine(open_model(str(folder)), "cpu", "float32", REFERENCE)
    engine.make_pools(32, 4, 4)
    runner = Runner(engine, REFERENCE, Slots(4, 64, 4, VOCAB), max_batched_tokens=64)
    return [runner.run(plan, rank=0) for plan in plans(1)]


def test_the_worker_answers_what_the_reference_does(
    side: ControlPlaneSide, worker: WorkerProcess, folder: Path
) -> None:
    wanted = reference_results(folder)
    side.receive(Register)
    side.reset(1)
    for plan in plans(1):
        side.data(plan.pack())
    for reference in wanted:
        found = side.receive(Result)
        assert found.tokens.tolist() == reference.tokens.tolist(), worker.log()
        if reference.draw_logprobs is not None:
            assert found.draw_logprobs is not None
            assert found.draw_logprobs.top_ids.tolist() == reference.draw_logprobs.top_ids.tolist()
            wanted_logprobs = pytest.approx(reference.draw_logprobs.logprobs.tolist(), abs=1e-4)
            assert found.draw_logprobs.logprobs.tolist() == wanted_logprobs
    assert sum(len(reference.tokens) for reference in wanted) >= 16


def test_a_worker_without_the_interpreter_says_what_it_needs(folder: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        worker = WorkerProcess(
            tmp_path, model=str(folder), engine="torch", kernels="triton", device="cpu"
        )
    try:
        assert worker.process.wait(60) == 1
        assert "--kernels triton" in worker.log()
        assert "TRITON_INTERPRET=1" in worker.log()
    finally:
        worker.close()
