"""Options of a worker."""

from dataclasses import dataclass

from octavo.common.exposure import check_exposure
from octavo.common.options import CURVE_KEYS_HELP, INSECURE_HELP, option, parse_bytes


@dataclass(frozen=True)
class WorkerOptions:
    """What `octavo worker` takes."""

    model: str = option(
        "demo", "model to serve: demo, a folder of safetensors, a .gguf file or a hub id"
    )
    served_model_name: str | None = option(None, "what clients call the model")
    controlplane_host: str = option("127.0.0.1", "host of the control plane")
    worker_port: int = option(7462, "control plane's port for workers", minimum=1, maximum=65535)
    worker_probe_host: str = option("127.0.0.1", "address of the worker's /health, /ready and /metrics")
    worker_probe_port: int = option(
        7464, "port of the worker's /health, /ready and /metrics", minimum=1, maximum=65535
    )
    curve_keys: str | None = option(None, CURVE_KEYS_HELP)
    insecure: bool = option(False, INSECURE_HELP)
    tensor_parallel: int = option(
        1, "workers of a gang, which share one copy of the model", minimum=1, maximum=64
    )
    gang: int | None = option(
        None, "gang whose seat this worker claims; by default any", minimum=0, maximum=1023
    )
    rank: int | None = option(
        None, "rank that this worker claims in its gang; by default a free one", minimum=0, maximum=63
    )
    advertise_host: str | None = option(
        None, "address under which the other ranks reach this worker; by default found out"
    )
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    engine: str = option(
        "auto",
        "what computes; auto is torch with native kernels on CPUs, or OpenVINO for what they lack",
        choices=("auto", "torch", "openvino"),
    )
    kernels: str = option(
        "auto",
        "implementation of the torch engine's operations; auto is native in float32 on CPUs and triton "
        "on GPUs; triton on a CPU needs TRITON_INTERPRET=1",
        choices=("auto", "reference", "native", "triton"),
    )
    dtype: str = option(
        "auto",
        "type that the engine computes in; auto is float32 on CPUs and bfloat16 on GPUs",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "weights on CPUs: none is float32, int8 rounds in groups of 32, exact4 keeps "
        "the small integers of a GGUF file; auto is exact4 where some have 4 bits, else none",
        choices=("auto", "none", "int8", "exact4"),
    )
    activations: str = option(
        "float32",
        "what int8 and 4-bit weights are multiplied with on CPUs: float32, or int16 or int8, rounded "
        "in groups of 32 as it goes, which is faster and less exact; int16 is of the native kernels",
        choices=("float32", "int16", "int8"),
    )
    kv_dtype: str = option(
        "auto",
        "type of the KV cache: float16 and uint8 are of the OpenVINO engine, fp8 (e4m3) of the torch "
        "engine; auto is float32 in the former, and the --dtype of the latter",
        choices=("auto", "float32", "float16", "uint8", "fp8"),
    )
    block_size: int | None = option(
        None,
        "tokens per KV block; by default what the engine prefers. The control plane decides; a worker "
        "is told so that it takes an engine that supports it",
        minimum=1,
        maximum=256,
    )
    num_kv_blocks: int | None = option(None, "blocks of the device's KV pool", minimum=1)
    kv_memory: int | None = option(
        None,
        "bytes of the device's KV pool, such as 4GiB; by default 25% of the available memory on CPUs",
        parse=parse_bytes,
        minimum=1,
    )
    swap_blocks: int | None = option(None, "blocks of the CPU swap pool", minimum=0)
    swap_memory: int | None = option(
        None,
        "bytes of the CPU swap pool; by default as much as the device pool",
        parse=parse_bytes,
        minimum=0,
    )
    memory_fraction: float = option(
        0.9, "share of a GPU's memory that the worker may take", minimum=0.05, maximum=1.0
    )
    threads: int | None = option(None, "threads that compute; by default one per CPU", minimum=1)
    log_level: str = option(
        "info", "least severe log lines shown", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        check_exposure(
            "--worker-probe-host",
            self.worker_probe_host,
            "the worker CURVE keys (--curve-keys FOLDER, which `octavo keygen FOLDER` makes)",
            is_protected=self.curve_keys is not None,
            insecure=self.insecure,
        )
