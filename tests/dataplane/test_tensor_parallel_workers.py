"""Gangs of real worker processes over gloo: T ranks answer as one, and survive the loss of any."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controlplane_side import ControlPlaneSide, GangSide, WorkerProcess, reset_message
from test_worker_process import decode_plan, first_plan
from test_worker_sizes import MODEL
from tiny_llama import hf_greedy, prompt_of, save_tiny_llama, tiny_llama
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import open_model
from octavo.common.options import OptionError
from octavo.dataplane.engine import EngineError
from octavo.dataplane.engines.choice import load_engine
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.parallel.gang import Rendezvous, address_towards, split_address
from octavo.dataplane.plan_loop import check_reset
from octavo.dataplane.process import advertised_host, check_seat_options
from octavo.proto.plan import Fault
from octavo.proto.session import Join, Refused, Register, Seat, WorkerBeat, WorkerBye
from octavo.proto.wire import ProtocolError

COUNT = 5  # tokens of a generation


class Gang:
    """Worker processes, each with the rank that it claims."""

    def __init__(self, folder: Path, model: Path, size: int) -> None:
        self.side = GangSide(size)
        self.model = str(model)
        self.workers: dict[int, WorkerProcess] = {}
        self._folder = folder
        self._started: list[WorkerProcess] = []
        self._epoch = 100
        for rank in range(size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        worker = WorkerProcess(
            self._folder,
            model=self.model,
            worker_port=self.side.port,
            num_kv_blocks=32,
            tensor_parallel=self.side.size,
            rank=rank,
            engine="auto",
        )
        self.workers[rank] = worker
        self._started.append(worker)

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def form(self) -> int:
        """A new epoch of all ranks."""
        self.side.gather()
        epoch = self.next_epoch()
        self.side.reset_ranks(epoch)
        self.side.await_ready(epoch)
        return epoch

    def generate(self, epoch: int) -> list[int]:
        """Tokens of one sequence, on which all ranks agree."""
        plans = [first_plan(epoch), *(decode_plan(epoch, number) for number in range(1, COUNT))]
        tokens = []
        for plan in plans:
            results = self.side.run(plan)
            assert [result.rank for result in results] == list(range(self.side.size))
            assert len({(r.digest, r.tokens.tobytes()) for r in results}) == 1
            tokens += results[0].tokens.tolist()
        return tokens

    def send_decode(self, epoch: int, ranks: list[int]) -> None:
        """The plan after the first, to some ranks only."""
        for rank in ranks:
            self.side.data(decode_plan(epoch, 1).pack(), worker=self.side.seats[rank])

    def replace(self, rank: int) -> int:
        """Another worker takes the place of a lost one; the epoch that follows."""
        self.side.forget(rank)
        self._start(rank)
        return self.form()

    def close(self) -> None:
        for worker in self._started:
            worker.close()
        self.side.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48, vocab_size=301)


@pytest.fixture(scope="module")
def wanted(model: LlamaForCausalLM) -> list[int]:
    return hf_greedy(model, prompt_of(6), COUNT)


@pytest.fixture(scope="module")
def gang(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    folder = tmp_path_factory.mktemp("gang")
    gang = Gang(folder, save_tiny_llama(model, folder / "model"), 3)
    yield gang
    gang.close()


def test_three_ranks_answer_as_one(gang: Gang, wanted: list[int]) -> None:
    assert gang.generate(gang.form()) == wanted
    registers = [gang.side.registers[rank] for rank in range(3)]
    assert [(r.gang, r.rank, r.tensor_parallel) for r in registers] == [(0, n, 3) for n in range(3)]
    assert all(r.rendezvous.startswith("127.0.0.1:") for r in registers)
    assert {r.token_bytes for r in registers} == {2 * 2 * 1 * 8 * 4}  # one of three KV heads
    assert all(r.weight_bytes > 0 and r.prefill_speed > 0 for r in registers)
    assert "not OpenVINO, since it holds whole models" in gang.workers[0].log()
    gang.side.receive(WorkerBeat)


@pytest.mark.parametrize(
    ("size", "kv_heads", "shares"),
    [
        pytest.param(2, 4, 2, id="2-split"),
        pytest.param(4, 4, 4, id="4-split", marks=pytest.mark.full),
        pytest.param(4, 2, 2, id="4-replicated"),
    ],
)
def test_gangs_of_two_and_four_answer_as_one(
    tmp_path: Path, size: int, kv_heads: int, shares: int
) -> None:
    """`shares`: among how many ranks the KV cache is divided."""
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=kv_heads, hidden_size=64)
    gang = Gang(tmp_path, save_tiny_llama(model, tmp_path / "model"), size)
    try:
        assert gang.generate(gang.form()) == hf_greedy(model, prompt_of(6), COUNT)
        registers = list(gang.side.registers.values())
    finally:
        gang.close()
    whole = 4 * sum(weight.numel() for weight in model.parameters())
    print(f"{size} ranks: {[r.weight_bytes for r in registers]} of {whole} bytes of weights")
    assert all(r.weight_bytes < 1.25 * whole / size for r in registers)  # norms are on every rank
    assert {r.token_bytes for r in registers} == {2 * 2 * kv_heads * 8 * 4 // shares}


def test_a_rank_that_is_killed_is_a_fault_of_the_others_until_the_gang_forms_again(
    gang: Gang, wanted: list[int]
) -> None:
    epoch = gang.form()
    gang.side.run(first_plan(epoch))
    gang.workers[1].stop(signal.SIGKILL)
    gang.send_decode(epoch, [0, 2])
    faults = [gang.side.receive(Fault) for _ in range(2)]
    assert {(fault.epoch, fault.rank) for fault in faults} == {(epoch, 0), (epoch, 2)}
    assert all("all-gather" in fault.reason for fault in faults)
    assert gang.generate(gang.replace(1)) == wanted


@pytest.mark.parametrize("stopped", [2, 0])
def test_a_rank_that_is_stopped_does_not_keep_the_others(
    gang: Gang, wanted: list[int], stopped: int
) -> None:
    """Rank 0 takes the store of the gang with it, and so the next meeting, too."""
    epoch = gang.form()
    gang.side.run(first_plan(epoch))
    silent = gang.workers[stopped]
    silent.process.send_signal(signal.SIGSTOP)
    others = [rank for rank in range(3) if rank != stopped]
    gang.send_decode(epoch, others)
    gang.side.reset_ranks(gang.next_epoch(), others)  # nothing comes of it
    assert gang.generate(gang.replace(stopped)) == wanted
    assert all(gang.workers[rank].process.poll() is None for rank in others)
    silent.process.send_signal(signal.SIGCONT)
    returned = gang.side.receive(Register)  # its beats are not known any more
    assert returned.rank == stopped
    gang.side.control(Refused(reason="the rank is taken"), returned.incarnation)
    assert silent.process.wait(60) == 1
    assert "the rank is taken" in silent.log()


def test_a_gang_stops_in_order(gang: Gang) -> None:
    gang.form()
    for worker in gang.workers.values():
        worker.process.send_signal(signal.SIGTERM)
    byes = {gang.side.receive(WorkerBye).incarnation for _ in range(3)}
    assert byes == set(gang.side.seats.values())
    assert [worker.process.wait(60) for worker in gang.workers.values()] == [0, 0, 0]


# -- one worker and its seat --------------------------------------------------------------------------


@pytest.fixture
def lone(tmp_path: Path, model_folder: Path) -> Iterator[tuple[ControlPlaneSide, WorkerProcess]]:
    """A control plane that gives no seat by itself, and a worker that wants one of two."""
    side = ControlPlaneSide()
    options: dict[str, Any] = {"model": str(model_folder), "num_kv_blocks": 32, "tensor_parallel": 2}
    worker = WorkerProcess(tmp_path, worker_port=side.port, **options)
    yield side, worker
    worker.close()
    side.close()


def test_a_worker_asks_until_it_is_seated_and_keeps_its_seat(
    lone: tuple[ControlPlaneSide, WorkerProcess],
) -> None:
    side, worker = lone
    join = side.receive(Join)
    assert (join.tensor_parallel, join.gang, join.rank) == (2, None, None)
    assert side.receive(Join).incarnation == join.incarnation
    side.control(Seat(controlplane=1, gang=4, rank=1), join.incarnation)
    registered = side.receive(Register)
    assert (registered.incarnation, registered.gang, registered.rank) == (join.incarnation, 4, 1)
    assert side.receive(Register).rank == 1  # again, until there is a reset
    side.control(Seat(controlplane=1, gang=4, rank=0), join.incarnation)
    assert worker.process.wait(60) == 1
    assert "gives rank 0 of gang 4, and this worker has the weights of rank 1" in worker.log()


def test_a_refused_worker_reads_no_weights(lone: tuple[ControlPlaneSide, WorkerProcess]) -> None:
    side, worker = lone
    join = side.receive(Join)
    side.control(Refused(reason="gangs have 3 ranks here"), join.incarnation)
    assert worker.process.wait(60) == 1
    assert "gangs have 3 ranks here" in worker.log()
    assert "loaded" not in worker.log()


def test_a_worker_without_a_seat_stops_in_order(lone: tuple[ControlPlaneSide, WorkerProcess]) -> None:
    side, worker = lone
    side.receive(Join)
    assert worker.stop() == 0


def test_a_size_that_does_not_divide_gives_the_seat_back(gang: Gang, tmp_path: Path) -> None:
    side = GangSide(4)
    worker = WorkerProcess(tmp_path, model=gang.model, worker_port=side.port, tensor_parallel=4)
    try:
        side.receive(WorkerBye)
        assert worker.process.wait(60) == 1
        assert "--tensor-parallel 4: num_attention_heads 6 cannot be divided by 4" in worker.log()
        assert "Traceback" not in worker.log()
    finally:
        worker.close()
        side.close()


# -- what is refused without a control plane ----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 2, "rank": 2}, "--rank 2: with --tensor-parallel 2 the ranks are 0 to 1"),
        ({"rank": 1}, "--rank 1: with --tensor-parallel 1 the ranks are 0 to 0"),
    ],
)
def test_ranks_that_no_gang_has_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_seat_options(WorkerOptions(**given))


def test_openvino_is_not_for_shards(model_folder: Path) -> None:
    options = WorkerOptions(tensor_parallel=2, engine="openvino", device="cpu")
    with pytest.raises(EngineError, match="--engine openvino: it holds whole models, and --tensor-par"):
        load_engine(open_model(str(model_folder)), options)


def test_an_address_that_is_not_here_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--advertise-host 203\.0\.113\.7: this machine cannot"):
        Rendezvous("203.0.113.7")


def test_what_ranks_say_is_not_for_other_machines_unless_it_may_be() -> None:
    given = {"tensor_parallel": 2, "advertise_host": "203.0.113.7"}
    with pytest.raises(OptionError, match=r"--advertise-host 203\.0\.113\.7 lets other machines in"):
        advertised_host(WorkerOptions(**given))  # type: ignore[arg-type]
    assert advertised_host(WorkerOptions(**given, insecure=True)) == "203.0.113.7"  # type: ignore[arg-type]
    assert advertised_host(WorkerOptions(tensor_parallel=2)) == "127.0.0.1"


def test_loopback_is_advertised_to_loopback_alone() -> None:
    assert address_towards("127.0.0.1", 7462) == "127.0.0.1"
    rendezvous = Rendezvous("127.0.0.1")
    host, port = split_address(rendezvous.address)
    sockets = Path("/proc/net/tcp").read_text()
    assert host == "127.0.0.1"
    assert f" 0100007F:{port:04X} " in sockets
    assert f" 00000000:{port:04X} " not in sockets


@pytest.mark.parametrize("address", ["", "host", ":7", "host:0", "host:65536", "host:-1", "host:x"])
def test_a_rendezvous_is_checked(address: str) -> None:
    reset = reset_message(1, 1, gang_size=2, rendezvous=address)
    register = Register(incarnation=1, device="cpu", engine="torch", model=MODEL, tensor_parallel=2)
    with pytest.raises(ProtocolError, match=r"reset\.rendezvous"):
        check_reset(reset, register)
