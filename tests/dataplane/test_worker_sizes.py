"""How large a worker makes its pools, and what it says when it cannot."""

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.dataplane.engine import EngineError
from octavo.dataplane.engines.choice import choose_device
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.memory import available_memory, room_in_cgroups
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.plan_loop import check_reset
from octavo.dataplane.process import pool_room
from octavo.proto.session import ModelInfo, Register, Reset
from octavo.proto.wire import ProtocolError

GIB = 1 << 30
MODEL = ModelInfo(name="tiny", family="llama", digest="d", vocab_size=300, max_model_len=256)


def room(monkeypatch: pytest.MonkeyPatch, **options: int) -> tuple[int, int, int | None]:
    monkeypatch.setattr("octavo.dataplane.process.available_memory", lambda: 16 * GIB)
    found = pool_room(WorkerOptions(**options), "cpu")  # type: ignore[arg-type]
    return found.kv_bytes, found.swap_bytes, found.swap_blocks


def test_pools_take_a_quarter_of_the_memory_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(monkeypatch) == (4 * GIB, 4 * GIB, None)


def test_swap_follows_the_device_pool_as_far_as_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert room(monkeypatch, kv_memory=GIB) == (GIB, GIB, None)
    assert room(monkeypatch, kv_memory=12 * GIB) == (12 * GIB, 4 * GIB, None)
    assert room(monkeypatch, num_kv_blocks=9) == (0, 0, 9)
    assert room(monkeypatch, num_kv_blocks=9, swap_blocks=0) == (0, 0, 0)
    assert room(monkeypatch, num_kv_blocks=9, swap_memory=GIB) == (0, GIB, None)


def test_room_under_a_cgroup_limit_counts_what_can_be_reclaimed(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert room_in_cgroups(tmp_path, "memory.max", "memory.current", "inactive_file") == [400]
    (tmp_path / "memory.max").write_text("max\n")
    assert room_in_cgroups(tmp_path, "memory.max", "memory.current", "inactive_file") == []
    assert available_memory() > 0


def test_pools_larger_than_the_memory_are_refused_before_they_are_made(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match=r"MiB are available: lower --num-kv-blocks"):
        engine.make_pools(1 << 40, 16, 0)
    engine.make_pools(4, 16, 2)
    engine.swap_out(np.array([3, 1], dtype=np.int32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == "cpu"
    with pytest.raises(EngineError, match="--device cuda"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("num_slots", 0),
        ("num_slots", 1 << 17),
        ("max_model_len", 257),
        ("max_batched_tokens", 0),
        ("num_blocks", 0),
        ("num_blocks", 1 << 29),
        ("num_cpu_blocks", -1),
        ("gang_size", 2),
    ],
)
def test_resets_that_make_no_sense_are_refused(field: str, value: int) -> None:
    reset = Reset(
        controlplane=1,
        epoch=1,
        gang=0,
        rank=0,
        gang_size=1,
        rendezvous="",
        num_slots=4,
        max_batched_tokens=64,
        max_model_len=64,
        num_blocks=8,
    )
    register = Register(incarnation=1, device="cpu", engine="torch", model=MODEL)
    check_reset(reset, register)
    setattr(reset, field, value)
    with pytest.raises(ProtocolError, match=rf"reset\.{field}"):
        check_reset(reset, register)
