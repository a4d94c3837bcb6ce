from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from measure.engines import make_engine, parse_engine_options
from measure.recording import Forwarder, Recording, RecordingError, recording_of
from replay_engine import replay

from octavo.dataplane.plan_loop import Epoch
from octavo.kernels.table import CPU
from octavo.proto.plan import Admit, Admits, Plan, Result, Sampling
from octavo.proto.session import BeatAnswer, Reset, control_identity, data_identity
from octavo.proto.wire import int32s

WAIT_MS = 20_000
RESET = Reset(
    controlplane=1,
    epoch=1,
    gang=0,
    rank=0,
    gang_size=1,
    rendezvous="",
    block_size=8,
    num_slots=2,
    max_batched_tokens=64,
    max_model_len=64,
    num_blocks=8,
    num_cpu_blocks=0,
)


def plans() -> list[Plan]:
    """A prompt of five tokens, then decodes, drawn at temperature 1."""
    admit = Admit(
        slot=0,
        tokens=int32s([504, 3575, 282, 4649, 314]),
        prompt_len=5,
        computed=0,
        blocks=int32s([6, 2]),
        sample=0,
        sampling=Sampling(temperature=1.0, seed=11, ignore_eos=True),
    )
    first = Plan(
        epoch=1,
        number=0,
        admits=Admits.of([admit]),
        chunk_slots=int32s([0]),
        chunk_lengths=int32s([5]),
        draw_slots=int32s([0]),
        draw_chunks=int32s([0]),
    )
    return [first, *(Plan(epoch=1, number=n, decode_slots=int32s([0])) for n in range(1, 5))]


@pytest.fixture(scope="module")
def recording() -> Recording:
    options = parse_engine_options("--engine torch --threads 1")
    files, engine = make_engine(options)
    engine.make_pools(RESET.num_blocks, RESET.block_size, RESET.num_cpu_blocks)
    runner = Epoch(RESET, engine, CPU, int(files.config["vocab_size"])).runner
    results = [runner.run(plan, 0) for plan in plans()]
    frames = [RESET.pack(), *(m.pack() for pair in zip(plans(), results, strict=True) for m in pair)]
    return recording_of(frames, marked=3)


def test_a_recording_keeps_the_last_epoch() -> None:
    beat = BeatAnswer(controlplane=1, known=True).pack()
    old, new = Plan(epoch=1, number=0).pack(), Plan(epoch=2, number=0).pack()
    result = Result(epoch=2, number=0, rank=0).pack()
    found = recording_of([RESET.pack(), old, RESET.pack(), beat, new, result, b"noise"], marked=4)
    assert (found.plans, found.results, found.first) == ([new], [result], 0)


def test_plans_after_the_mark_are_measured(recording: Recording) -> None:
    assert recording.first == 1
    assert len(recording.plans) == len(recording.results) == 5


def test_a_file_brings_a_recording_back(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "plans")
    assert Recording.load(tmp_path / "plans") == recording
    (tmp_path / "noise").write_bytes(b"\xc1")
    with pytest.raises(RecordingError, match="noise is not a recording"):
        Recording.load(tmp_path / "noise")


def test_a_recording_with_a_gap_is_refused(recording: Recording) -> None:
    gap = Recording(recording.reset, recording.plans, recording.results[1:])
    with pytest.raises(RecordingError, match="the run had faults"):
        gap.unpack()
    short = Recording(recording.reset, recording.plans, recording.results[:2])
    with pytest.raises(RecordingError, match="only 2 of 5 plans have results"):
        short.unpack()


def test_plans_in_flight_at_the_end_are_left_out(recording: Recording) -> None:
    ended = Recording(recording.reset, recording.plans, recording.results[:3])
    _, plans, results = ended.unpack()
    assert [plan.number for plan in plans] == [result.number for result in results] == [0, 1, 2]


def test_a_replay_draws_the_recorded_tokens(recording: Recording) -> None:
    torch.set_num_threads(1)
    options = parse_engine_options("--engine torch --threads 1")
    found = replay(recording, options)
    assert (found["plans"], found["tokens"], found["different_tokens"]) == (4, 5, 0)
    wrong = Result.unpack(recording.results[2])
    wrong.tokens = np.array([wrong.tokens[0] + 1], dtype=np.int32)
    results = [*recording.results[:2], wrong.pack(), *recording.results[3:]]
    changed = Recording(recording.reset, recording.plans, results, recording.first)
    assert replay(changed, options)["different_tokens"] == 1


def test_a_forwarder_carries_frames_both_ways_under_the_workers_identities() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as controlplane:
        controlplane.setsockopt(zmq.ROUTER_MANDATORY, 1)
        forwarder = Forwarder(controlplane.bind_to_random_port("tcp://127.0.0.1"))
        forwarder.start()
        with context.socket(zmq.DEALER) as control, context.socket(zmq.DEALER) as data:
            for socket, identity in ((control, control_identity), (data, data_identity)):
                socket.setsockopt(zmq.ROUTING_ID, identity(7))
                socket.connect(f"tcp://127.0.0.1:{forwarder.port}")
            for socket in (controlplane, control, data):
                socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
                socket.setsockopt(zmq.LINGER, 0)
            control.send(b"register")
            assert controlplane.recv_multipart() == [control_identity(7), b"register"]
            controlplane.send_multipart([control_identity(7), RESET.pack()])
            assert control.recv() == RESET.pack()
            data.send(b"hello")
            assert controlplane.recv_multipart() == [data_identity(7), b"hello"]
            forwarder.mark()
            plan = Plan(epoch=1, number=0).pack()
            controlplane.send_multipart([data_identity(7), plan])
            assert data.recv() == plan
            recorded = forwarder.stop()
    assert (recorded.reset, recorded.plans, recorded.first) == (RESET.pack(), [plan], 0)
