"""What a worker process does: loads a model, joins the control plane, runs plans."""

import dataclasses
import logging
import secrets
from dataclasses import dataclass

import torch
import zmq

from octavo.common.curve import ClientKeys, client_keys
from octavo.common.exposure import check_exposure
from octavo.common.loop_socket import Context
from octavo.common.modelfiles import ModelError, ModelFiles, gguf_reader, open_model
from octavo.common.options import OptionError
from octavo.common.probes import ProbeServer
from octavo.dataplane.engine import Engine, EngineError
from octavo.dataplane.engines.choice import choose_kernels
from octavo.dataplane.engines.choice import load_engine as load_engine
from octavo.dataplane.heartbeat import Heartbeat, Progress
from octavo.dataplane.links import Line, send, thread_pair
from octavo.dataplane.memory import available_memory
from octavo.dataplane.metrics import WorkerMetrics
from octavo.dataplane.models.shard import ALONE, Collectives, Shard
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.parallel.collectives import GangCollectives, Interruption
from octavo.dataplane.parallel.gang import Gang, address_towards
from octavo.dataplane.parallel.seat import take_seat
from octavo.dataplane.plan_loop import PlanLoop, RefusedByControlPlane
from octavo.dataplane.profiling import measure
from octavo.dataplane.stopping import StopSignal
from octavo.proto.session import (
    Join,
    Register,
    Seat,
    WorkerBye,
    control_identity,
    data_identity,
)
from octavo.proto.wire import int32s

log = logging.getLogger(__name__)

CPU_KV_SHARE = 0.25  # of the available memory, for each of the two pools


def run(options: WorkerOptions, stop: StopSignal) -> int:
    """Works until the stop signal. Returns the process's exit code."""
    metrics, progress = WorkerMetrics(), Progress()
    interruption = Interruption(lambda: stop.requested)
    try:
        probes = _serve_probes(options, progress, metrics)
        try:
            Worker(options, stop, progress, metrics, interruption).work()
        finally:
            probes.close()
    except (ModelError, EngineError, OptionError) as error:
        log.error("%s", error)
        return 1
    except RefusedByControlPlane as error:
        log.error("the control plane refused this worker: %s", error)
        return 1
    log.info("stopped")
    return 0


def _serve_probes(options: WorkerOptions, progress: Progress, metrics: WorkerMetrics) -> ProbeServer:
    host, port = options.worker_probe_host, options.worker_probe_port
    try:
        return ProbeServer(host, port, lambda: progress.done[0] > 0, metrics.registry)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --worker-probe-port"
        ) from error


class Link:
    """The worker's ways to the control plane: its data socket, and the thread that beats."""

    def __init__(
        self,
        options: WorkerOptions,
        keys: ClientKeys | None,
        hello: Join | Register,
        progress: Progress,
        interruption: Interruption | None = None,
    ) -> None:
        self._context: Context = zmq.Context()
        place = f"{options.controlplane_host}:{options.worker_port}"
        self.data, control = (
            Line(self._context, f"tcp://{place}", identity(hello.incarnation), keys)
            for identity in (data_identity, control_identity)
        )
        self.heart, main_end = thread_pair(self._context)
        self._bye = WorkerBye(incarnation=hello.incarnation).pack()
        self._thread = Heartbeat(control, main_end, hello, progress, place, interruption)
        self._thread.start()

    def close(self) -> None:
        """Says goodbye, where that has not been said."""
        send(self.heart, self._bye)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._context.destroy(linger=1000)


@dataclass(frozen=True)
class Worker:
    """What a worker's parts share from its start to its end."""

    options: WorkerOptions
    stop: StopSignal
    progress: Progress
    metrics: WorkerMetrics
    interruption: Interruption

    def work(self) -> None:
        """Until the stop signal. Raises what `run` knows."""
        check_seat_options(self.options)
        keys = client_keys(self.options.curve_keys, "worker")
        if self.options.tensor_parallel == 1:
            self._alone(keys)
        else:
            self._in_a_gang(keys)

    def _alone(self, keys: ClientKeys | None) -> None:
        files, engine = _load(self.options, ALONE)
        if self.stop.requested:
            return
        register = describe(files, engine, self.options, _new_incarnation())
        link = Link(self.options, keys, register, self.progress)
        try:
            self._run(link, register, engine, None)
        finally:
            link.close()

    def _in_a_gang(self, keys: ClientKeys | None) -> None:
        """Takes a seat first, because it says which part of the weights to read."""
        options, files = self.options, open_model(self.options.model, self.options.served_model_name)
        join = Join(
            incarnation=_new_incarnation(),
            tensor_parallel=options.tensor_parallel,
            model=files.info(),
            gang=options.gang,
            rank=options.rank,
        )
        link = Link(options, keys, join, self.progress, self.interruption)
        try:
            seat = take_seat(link.heart, join, self.stop)
            if seat is not None:
                self._seated(link, join, seat)
        finally:
            link.close()

    def _seated(self, link: Link, join: Join, seat: Seat) -> None:
        options = self.options
        collectives = GangCollectives(Shard(seat.rank, join.tensor_parallel), self.interruption)
        host = advertised_host(options)
        files, engine = _load(options, collectives)
        gang = Gang(seat.gang, collectives, host, engine.describe().device)
        register = describe(files, engine, options, join.incarnation)
        register.gang, register.rank, register.rendezvous = seat.gang, seat.rank, gang.address
        if self.stop.requested:
            return
        send(link.heart, register.pack())
        self._run(link, register, engine, gang)

    def _run(self, link: Link, register: Register, engine: Engine, gang: Gang | None) -> None:
        kernels = choose_kernels(self.options.kernels, register.device)
        loop = PlanLoop(
            link.data, link.heart, register, engine, kernels, self.progress, self.metrics, gang
        )
        loop.run(self.stop)


def check_seat_options(options: WorkerOptions) -> None:
    """Raises OptionError for a rank that a gang does not have."""
    if options.rank is not None and options.rank >= options.tensor_parallel:
        raise OptionError(
            f"--rank {options.rank}: with --tensor-parallel {options.tensor_parallel} the ranks are "
            f"0 to {options.tensor_parallel - 1}"
        )


def advertised_host(options: WorkerOptions) -> str:
    """Where the other ranks reach this one: what ranks say to one another nothing protects.

    Raises:
        OptionError: it is not for this machine alone, and nobody said that it may be open.
    """
    found = options.advertise_host or address_towards(options.controlplane_host, options.worker_port)
    check_exposure(
        "--advertise-host",
        found,
        "all ranks of a gang one machine and --advertise-host 127.0.0.1",
        is_protected=False,
        insecure=options.insecure,
    )
    return found


def _new_incarnation() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True)
class PoolRoom:
    """How large the pools may be: bytes where the count of blocks is not given."""

    kv_bytes: int
    swap_bytes: int
    swap_blocks: int | None


def _load(options: WorkerOptions, collectives: Collectives) -> tuple[ModelFiles, Engine]:
    """The engine, and the model without the vocabulary that a GGUF file brings."""
    files = open_model(options.model, options.served_model_name)
    engine = load_engine(files, options, collectives)
    gguf_reader.cache_clear()
    return dataclasses.replace(files, gguf={}), engine


def describe(files: ModelFiles, engine: Engine, options: WorkerOptions, incarnation: int) -> Register:
    """What the control plane hears of this worker. Measures the engine."""
    info = engine.describe()
    prefill_speed, copy_bandwidth = measure(engine)
    log.info(
        "measured %.0f prompt tokens/s, and %.1f GB/s between the pools",
        prefill_speed,
        copy_bandwidth / 1e9,
    )
    room = pool_room(options, info.device)
    return Register(
        incarnation=incarnation,
        device=info.device,
        engine=info.engine,
        model=files.info(),
        block_sizes=int32s(info.block_sizes),
        preferred_block_size=info.preferred_block_size,
        tensor_parallel=options.tensor_parallel,
        gang=options.gang,
        rank=options.rank,
        weight_bytes=info.weight_bytes,
        token_bytes=info.token_bytes,
        kv_bytes=room.kv_bytes,
        num_kv_blocks=options.num_kv_blocks,
        swap_bytes=room.swap_bytes,
        swap_blocks=room.swap_blocks,
        copy_bandwidth=copy_bandwidth,
        prefill_speed=prefill_speed,
    )


def pool_room(options: WorkerOptions, device: str) -> PoolRoom:
    """The sizes of the pools from the options and the memory that is free."""
    # Ranks may share this machine; each holds a part of every token, so they need no more in all.
    share = int(available_memory() * CPU_KV_SHARE) // options.tensor_parallel
    kv_bytes = options.kv_memory or (share if device == "cpu" else _gpu_room(options.memory_fraction))
    if options.num_kv_blocks is not None:
        kv_bytes = 0
    swap_blocks, swap_bytes = options.swap_blocks, options.swap_memory
    if swap_blocks is None and swap_bytes is None:
        # As much as the device pool, as far as there is memory.
        swap_blocks = options.num_kv_blocks
        swap_bytes = min(kv_bytes, share)
    return PoolRoom(kv_bytes=kv_bytes, swap_bytes=swap_bytes or 0, swap_blocks=swap_blocks)


def _gpu_room(fraction: float) -> int:
    free, total = torch.cuda.mem_get_info()
    return max(0, int(free - total * (1.0 - fraction)))
