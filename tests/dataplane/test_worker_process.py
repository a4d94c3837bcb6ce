"""A real worker process against the control plane's side of the protocol."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
from controlplane_side import ControlPlaneSide, WorkerProcess
from ports import free_ports
from tiny_llama import VOCAB, hf_greedy, prompt_of
from transformers import LlamaForCausalLM

from octavo.proto.plan import Admit, Admits, Fault, Plan, Result, Sampling
from octavo.proto.session import Refused, Register, WorkerBeat, WorkerBye
from octavo.proto.wire import int32s

BLOCKS = (17, 3, 30, 8, 21)


def first_plan(epoch: int, number: int = 0, length: int = 6, blocks: tuple[int, ...] = BLOCKS) -> Plan:
    admit = Admit(
        slot=2,
        tokens=int32s(prompt_of(length)),
        prompt_len=length,
        computed=0,
        blocks=int32s(blocks),
        sample=0,
        sampling=Sampling(temperature=0.0),
    )
    return Plan(
        epoch=epoch,
        number=number,
        admits=Admits.of([admit]),
        chunk_slots=int32s([2]),
        chunk_lengths=int32s([length]),
        draw_slots=int32s([2]),
        draw_chunks=int32s([0]),
    )


def pack(fields: list[object]) -> bytes:
    packed: bytes = msgpack.packb(fields)  # type: ignore[no-untyped-call]
    return packed


def decode_plan(epoch: int, number: int) -> Plan:
    return Plan(epoch=epoch, number=number, decode_slots=int32s([2]))


@pytest.fixture(scope="module")
def registered(side: ControlPlaneSide, worker: WorkerProcess) -> Register:
    return side.receive(Register)


@pytest.fixture
def epoch(side: ControlPlaneSide, registered: Register, epochs: Iterator[int]) -> int:
    number = next(epochs)
    side.reset(number)
    return number


@pytest.fixture(scope="module")
def epochs() -> Iterator[int]:
    return iter(range(10, 1000))


def test_registers_with_what_it_is(registered: Register, worker: WorkerProcess) -> None:
    assert (registered.device, registered.engine) == ("cpu", "torch")
    assert registered.model.family == "llama"
    assert registered.model.vocab_size == VOCAB
    assert registered.model.max_model_len == 256
    assert registered.model.eos_token_ids.tolist() == [2]
    assert registered.token_bytes == 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head size, fp32
    assert (registered.num_kv_blocks, registered.kv_bytes, registered.swap_blocks) == (32, 0, 32)
    assert registered.prefill_speed > 0
    assert registered.copy_bandwidth > 0
    assert worker.get("/health")[0] == 200


def test_runs_plans_and_counts_them(
    side: ControlPlaneSide, worker: WorkerProcess, epoch: int, hf_model: LlamaForCausalLM
) -> None:
    plans = [first_plan(epoch), *(decode_plan(epoch, number) for number in range(1, 9))]
    for plan in plans:  # all at once: they wait for one another
        side.data(plan.pack())
    results = [side.receive(Result) for _ in plans]
    assert [(r.epoch, r.number) for r in results] == [(epoch, number) for number in range(9)]
    tokens = [token for result in results for token in result.tokens.tolist()]
    assert tokens == hf_greedy(hf_model, prompt_of(6), 9)
    assert results[0].timings.total >= results[0].timings.forward > 0
    while side.receive(WorkerBeat).plans_done != 9:
        side.answer_beat(known=True)
    assert worker.get("/ready")[0] == 200
    assert "octavo_worker_live_slots 1.0" in worker.get("/metrics")[1]


def test_a_wrong_number_is_reported_once_and_mended_by_a_reset(
    side: ControlPlaneSide, epoch: int, epochs: Iterator[int]
) -> None:
    side.data(first_plan(epoch).pack())
    side.receive(Result)
    for number in (2, 1, 3):
        side.data(decode_plan(epoch, number).pack())
    fault = side.receive(Fault, Result)
    assert isinstance(fault, Fault)
    assert (fault.epoch, fault.number) == (epoch, 2)
    assert "1 comes next" in fault.reason
    fresh = next(epochs)
    side.reset(fresh)
    side.data(first_plan(fresh).pack())
    answer = side.receive(Fault, Result)  # nothing of the old epoch came in between
    assert isinstance(answer, Result)
    assert answer.epoch == fresh


def test_plans_of_another_epoch_are_dropped_in_silence(side: ControlPlaneSide, epoch: int) -> None:
    for other in (epoch - 1, epoch + 1):
        side.data(first_plan(other).pack())
        side.data(decode_plan(other, 7).pack())
    side.data(first_plan(epoch).pack())
    answer = side.receive(Fault, Result)
    assert isinstance(answer, Result)
    assert (answer.epoch, answer.number) == (epoch, 0)


def test_bytes_that_are_no_plan_are_refused_and_change_nothing(
    side: ControlPlaneSide, worker: WorkerProcess, epoch: int
) -> None:
    good = first_plan(epoch).pack()
    fields: list[object] = msgpack.unpackb(good)  # type: ignore[attr-defined,no-untyped-call]
    short, newer = pack(fields[:-1]), pack([99, *fields[1:]])
    noise = np.random.default_rng(0).bytes(200)
    frames = (b"", b"\x00", noise, good[:-3], short, newer)
    for frame in frames:
        side.data(frame)
    side.data(good, good)
    side.data(good)
    answer = side.receive(Fault, Result)
    assert isinstance(answer, Result)
    assert answer.number == 0
    assert f"octavo_worker_refused_frames_total {len(frames) + 1}.0" in worker.get("/metrics")[1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"decode_slots": int32s([4])}, "decode_slots"),
        ({"copies": int32s([0, 32])}, "copies"),
        ({"swap_out": int32s([0, 4])}, "swap_out"),
        ({"decode_slots": int32s([3])}, "holds no sequence"),
        ({"chunk_lengths": int32s([65])}, "beyond its tokens"),
    ],
)
def test_a_plan_that_does_not_fit_is_a_fault_without_content(
    side: ControlPlaneSide, epoch: int, change: dict[str, object], word: str
) -> None:
    plan = first_plan(epoch)
    for name, value in change.items():
        setattr(plan, name, value)
    side.data(plan.pack())
    fault = side.receive(Fault, Result)
    assert isinstance(fault, Fault)
    assert word in fault.reason


def test_a_reset_of_another_shape_makes_new_pools(
    side: ControlPlaneSide, worker: WorkerProcess, registered: Register, epochs: Iterator[int]
) -> None:
    epoch = next(epochs)
    side.reset(epoch, block_size=16, num_blocks=40, num_cpu_blocks=2)
    assert 'octavo_worker_pool_blocks{pool="device"} 40.0' in worker.get("/metrics")[1]
    plan = first_plan(epoch, blocks=(39,))
    side.data(plan.pack())
    assert isinstance(side.receive(Fault, Result), Result)


def test_registers_again_when_it_is_not_known(side: ControlPlaneSide, epoch: int) -> None:
    side.receive(WorkerBeat)
    side.answer_beat(known=False)
    assert side.receive(Register).incarnation == side.worker


def test_a_new_control_plane_gets_a_registration_and_the_worker_stops_in_order(
    model_folder: Path, tmp_path: Path
) -> None:
    port = free_ports(1)[0]
    worker = WorkerProcess(tmp_path, model=str(model_folder), worker_port=port, num_kv_blocks=32)
    try:
        worker.wait_for_log(f"waiting for the control plane at 127.0.0.1:{port}")
        assert worker.get("/ready")[0] == 503
        old = ControlPlaneSide(port, incarnation=1)
        registered = old.receive(Register)
        old.reset(5)
        old.close()
        new = ControlPlaneSide(port, incarnation=2)
        new.worker = registered.incarnation
        new.receive(WorkerBeat)
        new.answer_beat(known=True)  # of another incarnation than the one that it joined
        assert new.receive(Register).incarnation == registered.incarnation
        new.reset(1)
        new.data(first_plan(1).pack())
        worker.process.terminate()
        assert isinstance(new.receive(WorkerBye, Result), Result | WorkerBye)
        assert worker.process.wait(60) == 0
        assert "stopped" in worker.log()
        new.close()
    finally:
        worker.close()


def test_a_refused_worker_says_why_and_exits(model_folder: Path, tmp_path: Path) -> None:
    side = ControlPlaneSide()
    worker = WorkerProcess(tmp_path, model=str(model_folder), worker_port=side.port, num_kv_blocks=32)
    try:
        side.receive(Register)
        side.control(Refused(reason="another model is served here"))
        assert worker.process.wait(60) == 1
        assert "another model is served here" in worker.log()
        assert "Traceback" not in worker.log()
    finally:
        worker.close()
        side.close()


def test_bad_starts_are_one_clear_line(model_folder: Path, tmp_path: Path) -> None:
    taken = free_port_held()
    starts = [
        (WorkerProcess(tmp_path, model="/nowhere/model"), "there is no model at /nowhere/model"),
        (
            WorkerProcess(tmp_path, model=str(model_folder), worker_probe_port=taken.getsockname()[1]),
            "choose another --worker-probe-port",
        ),
    ]
    try:
        for worker, text in starts:
            assert worker.process.wait(60) == 1
            assert text in worker.log()
            assert "Traceback" not in worker.log()
            assert worker.log().count("\n") == 1
    finally:
        taken.close()
        for worker, _ in starts:
            worker.close()


def free_port_held() -> socket.socket:
    """A listening socket: its port is taken."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    return held
