"""Which engine a worker takes, and with what."""

import logging
import os
import time
from dataclasses import replace
from functools import partial

import torch

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.engine import Engine, EngineError
from octavo.dataplane.models.shard import ALONE, Collectives
from octavo.dataplane.options import WorkerOptions
from octavo.kernels.table import CPU, Kernels, KernelsError, kernels_named, native_kernels

log = logging.getLogger(__name__)

# As `octavo.dataplane.engines.openvino.adapter` has it, which can only be imported with the library.
_OPENVINO_BLOCK_SIZE = 32


def load_engine(files: ModelFiles, options: WorkerOptions, collectives: Collectives = ALONE) -> Engine:
    """The engine that the options ask for, with the weights of this rank.

    Raises:
        ModelError: the model cannot be used.
        EngineError: the engine cannot run here, or the options do not go together.
    """
    device = choose_device(options.device, collectives.shard.rank)
    if options.engine == "openvino" and (obstacle := obstacle_to_openvino(options, device)):
        raise EngineError(f"--engine openvino: {obstacle}")
    begin = time.perf_counter()
    reason = _reason_for_torch(options, device)
    if reason:
        engine, what = _load_torch(files, options, device, reason, collectives)
    else:
        reason = f"--engine {options.engine}"
        engine, what = _load_openvino(files, options)
    seconds = time.perf_counter() - begin
    log.info("loaded %s into the %s (%s) in %.1f s", files.name, what, reason, seconds)
    return engine


def _reason_for_torch(options: WorkerOptions, device: str) -> str | None:
    """Why the torch engine is taken, if so."""
    if options.engine != "auto":
        return "--engine torch" if options.engine == "torch" else None
    obstacle = _obstacle_in_options(options, device)
    if obstacle is None:
        if prefers_native(options):  # asked before the library is, whose import takes time and memory
            return "--engine auto: its native kernels are faster than OpenVINO"
        obstacle = _obstacle_in_library()
    return f"not OpenVINO, since {obstacle}" if obstacle else None


def prefers_native(options: WorkerOptions) -> bool:
    """Whether the torch engine's native kernels can compute all as asked.

    `docs/performance.md` compares them with OpenVINO, for float32 and for small integers as weights.
    """
    return options.kv_dtype in ("auto", "float32") and native_kernels() is not None


def obstacle_to_openvino(options: WorkerOptions, device: str) -> str | None:
    """Why the OpenVINO engine cannot be had, if so."""
    return _obstacle_in_options(options, device) or _obstacle_in_library()


def _obstacle_in_options(options: WorkerOptions, device: str) -> str | None:
    if device != "cpu":
        return f"it computes on CPUs, and the device is {device}"
    if options.tensor_parallel > 1:
        return f"it holds whole models, and --tensor-parallel is {options.tensor_parallel}"
    if options.dtype not in ("auto", "float32"):
        return f"it computes in float32, which --dtype {options.dtype} does not allow"
    if options.kv_dtype == "fp8":
        return "--kv-dtype fp8 is of the torch engine"
    if options.kernels != "auto":
        return f"--kernels {options.kernels} names operations of the torch engine"
    if options.activations == "int16":
        return "--activations int16 is of the torch engine"
    size = options.block_size
    if size not in (None, _OPENVINO_BLOCK_SIZE):
        return f"it takes blocks of {_OPENVINO_BLOCK_SIZE} tokens, and --block-size is {size}"
    return None


def _obstacle_in_library() -> str | None:
    try:
        from octavo.dataplane.engines.openvino.adapter import UnusableError, require_usable
    except ImportError as error:
        return f"it cannot be loaded ({error}); `pip install openvino` brings it"
    try:
        require_usable()
    except UnusableError as error:
        return str(error)
    return None


def _load_openvino(files: ModelFiles, options: WorkerOptions) -> tuple[Engine, str]:
    from octavo.dataplane.engines.openvino.engine import OpenVinoEngine

    # What torch still does here, sampling, is little, and its threads would fight for the cores with
    # OpenVINO's, which spin for a while after each forward: that took 0.5 ms for each torch operation.
    torch.set_num_threads(1)
    packing = choose_packing(files, options.quantization)
    kv_dtype = "float32" if options.kv_dtype == "auto" else options.kv_dtype
    threads = options.threads or available_cpus()
    rounds = options.activations == "int8"
    what = f"OpenVINO engine: weights {packing}, KV cache {kv_dtype}, {threads} threads"
    what += ", activations int8" if rounds else ""
    return OpenVinoEngine(files, packing, kv_dtype, threads, rounds), what


def choose_packing(files: ModelFiles, quantization: str) -> str:
    """How the weights are held; `auto` keeps 4-bit weights that a file has and rounds nothing.

    Raises:
        EngineError: exact4 is asked of a file that has no 4-bit weights.
    """
    if quantization not in ("auto", "exact4"):
        return quantization
    if has_4_bit_weights(files):
        return "exact4"
    if quantization == "exact4":
        raise EngineError(
            f"--quantization exact4: {files.path} has no Q4_0, Q4_1 or Q4_K weights to keep; "
            "int8 works with any model"
        )
    return "none"


def has_4_bit_weights(files: ModelFiles) -> bool:
    """Whether there are 4-bit integers in the model's files that can be kept."""
    if files.format != "gguf":
        return False
    from octavo.dataplane.loading import gguf

    return gguf.has_4_bit_weights(files)


def _load_torch(
    files: ModelFiles, options: WorkerOptions, device: str, reason: str, collectives: Collectives
) -> tuple[Engine, str]:
    from octavo.dataplane.engines.torch_engine import TorchEngine

    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    kernels = choose_kernels(options.kernels, device, dtype)
    packing = _packing_for_torch(files, options, kernels, collectives, reason)
    if packing == "none" and options.activations != "float32":
        raise EngineError(
            f"--activations {options.activations}: the torch engine ({reason}) multiplies small "
            "integers with small integers, and --quantization leaves the weights as they are"
        )
    kv_fp8 = options.kv_dtype == "fp8"
    if not kv_fp8 and options.kv_dtype not in ("auto", dtype):
        raise EngineError(
            f"--kv-dtype {options.kv_dtype} is for the OpenVINO engine, "
            f"and the torch engine is taken ({reason})"
        )
    threads = options.threads or available_cpus()
    computes = set_compute_threads(kernels, threads)
    if device != "cpu":
        torch.cuda.set_device(device)  # kernels are launched on the current one
    kernels = with_activations(kernels, options.activations)
    engine = TorchEngine(files, device, dtype, kernels, kv_fp8, collectives, packing)
    weights = dtype if packing == "none" else f"weights {packing}, activations {options.activations}"
    what = f"torch engine: {weights} on {device}, KV cache {'fp8' if kv_fp8 else dtype}"
    what += f", {computes}" if device == "cpu" else ""
    shard = collectives.shard
    if shard.size > 1:
        graphs = "" if device == "cpu" else ", no decode graphs"
        what += f", rank {shard.rank} of {shard.size}{graphs}"
    return engine, what


def _packing_for_torch(
    files: ModelFiles, options: WorkerOptions, kernels: Kernels, collectives: Collectives, reason: str
) -> str:
    """How the torch engine holds the weights: only native kernels know integers, and whole matrices."""
    obstacle = None
    if kernels is not native_kernels():
        obstacle = f"the torch engine without native kernels has no integers ({reason})"
    elif collectives.shard.size > 1:
        obstacle = f"ranks hold parts of matrices, and --tensor-parallel is {collectives.shard.size}"
    if obstacle is None:
        return choose_packing(files, options.quantization)
    if options.quantization not in ("auto", "none"):
        raise EngineError(f"--quantization {options.quantization}: {obstacle}")
    return "none"


def with_activations(kernels: Kernels, activations: str) -> Kernels:
    """Native kernels of which `prepare_linear` has small integers multiplied with such activations."""
    if activations == "float32":
        return kernels
    from octavo.kernels.cpu import native

    bits = {"int16": 16, "int8": 8}[activations]
    return replace(kernels, prepare_linear=partial(native.prepare_linear, activation_bits=bits))


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_device(wanted: str, rank: int = 0) -> str:
    """``cpu`` or ``cuda:N``, for the ranks of a gang on one machine each another.

    Raises:
        EngineError: the wanted one is not there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise EngineError("--device cuda: torch finds no GPU here; use --device cpu")
    return f"cuda:{rank % torch.cuda.device_count()}" if wanted == "cuda" else wanted


def choose_kernels(name: str, device: str, dtype: str = "float32") -> Kernels:
    """The table of that name for a device. Raises EngineError where it cannot run there."""
    device_type = device.split(":")[0]
    if device_type == "cpu" and dtype != "float32":
        if name == "native":
            raise EngineError(f"--kernels native: they compute in float32, and --dtype is {dtype}")
        if name == "auto":
            return CPU
    try:
        return kernels_named(name, device_type)
    except KernelsError as error:
        raise EngineError(f"--kernels {name}: {error}") from error


def set_compute_threads(kernels: Kernels, threads: int) -> str:
    """Gives `threads` to what computes with these kernels on a CPU; says to what."""
    if kernels is not native_kernels():
        torch.set_num_threads(threads)
        return f"{threads} threads"
    from octavo.kernels.cpu import _native

    _native.set_threads(threads)
    torch.set_num_threads(1)  # more would wait for the cores that the native threads have
    return f"native kernels ({_native.instruction_sets()[0]}), {threads} threads"
