"""What a worker process does: loads a model, joins the control plane, runs plans."""

import dataclasses
import logging
import secrets
from dataclasses import dataclass

import torch
import zmq

from octavo.common.curve import client_keys
from octavo.common.modelfiles import ModelError, ModelFiles, gguf_reader, open_model
from octavo.common.options import OptionError
from octavo.common.probes import ProbeServer
from octavo.dataplane.engine import Engine, EngineError
from octavo.dataplane.engines.choice import choose_kernels
from octavo.dataplane.engines.choice import load_engine as load_engine
from octavo.dataplane.heartbeat import Heartbeat, Progress
from octavo.dataplane.links import Line, thread_pair
from octavo.dataplane.memory import available_memory
from octavo.dataplane.metrics import WorkerMetrics
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.plan_loop import PlanLoop, RefusedByControlPlane
from octavo.dataplane.profiling import measure
from octavo.dataplane.stopping import StopSignal
from octavo.proto.session import Register, control_identity, data_identity
from octavo.proto.wire import int32s

log = logging.getLogger(__name__)

CPU_KV_SHARE = 0.25  # of the available memory, for each of the two pools


def run(options: WorkerOptions, stop: StopSignal) -> int:
    """Works until the stop signal. Returns the process's exit code."""
    metrics, progress = WorkerMetrics(), Progress()
    try:
        probes = _serve_probes(options, progress, metrics)
        try:
            _work(options, stop, progress, metrics)
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


def _work(options: WorkerOptions, stop: StopSignal, progress: Progress, metrics: WorkerMetrics) -> None:
    keys = client_keys(options.curve_keys, "worker")
    files, engine = _load(options)
    if stop.requested:
        return
    register = describe(files, engine, options)
    place = f"{options.controlplane_host}:{options.worker_port}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    data, control = (
        Line(context, f"tcp://{place}", identity(register.incarnation), keys)
        for identity in (data_identity, control_identity)
    )
    heart, main_end = thread_pair(context)
    heartbeat = Heartbeat(control, main_end, register, progress, place)
    kernels = choose_kernels(options.kernels, engine.describe().device)
    heartbeat.start()
    try:
        PlanLoop(data, heart, register, engine, kernels, progress, metrics).run(stop)
    finally:
        heartbeat.join(timeout=2.0)
        if not heartbeat.is_alive():
            context.destroy(linger=1000)


@dataclass(frozen=True)
class PoolRoom:
    """How large the pools may be: bytes where the count of blocks is not given."""

    kv_bytes: int
    swap_bytes: int
    swap_blocks: int | None


def _load(options: WorkerOptions) -> tuple[ModelFiles, Engine]:
    """The engine, and the model without the vocabulary that a GGUF file brings."""
    files = open_model(options.model, options.served_model_name)
    engine = load_engine(files, options)
    gguf_reader.cache_clear()
    return dataclasses.replace(files, gguf={}), engine


def describe(files: ModelFiles, engine: Engine, options: WorkerOptions) -> Register:
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
        incarnation=secrets.randbits(63),
        gang=options.gang,
        rank=options.rank,
        device=info.device,
        engine=info.engine,
        model=files.info(),
        block_sizes=int32s(info.block_sizes),
        preferred_block_size=info.preferred_block_size,
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
    share = int(available_memory() * CPU_KV_SHARE)
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
