"""Options of the control plane."""

from dataclasses import dataclass

from octavo.common.exposure import check_exposure
from octavo.common.options import CURVE_KEYS_HELP, INSECURE_HELP, OptionError, option
from octavo.controlplane.preemption import MODES


@dataclass(frozen=True)
class ControlPlaneOptions:
    """What `octavo controlplane` takes."""

    controlplane_bind: str = option("127.0.0.1", "address on which the control plane listens")
    gateway_port: int = option(7461, "control plane's port for gateways", minimum=1, maximum=65535)
    worker_port: int = option(7462, "control plane's port for workers", minimum=1, maximum=65535)
    controlplane_probe_port: int = option(
        7463, "port of the control plane's /health, /ready and /metrics", minimum=1, maximum=65535
    )
    curve_keys: str | None = option(None, CURVE_KEYS_HELP)
    insecure: bool = option(False, INSECURE_HELP)
    tensor_parallel: int = option(
        1, "workers of a gang, which share one copy of the model", minimum=1, maximum=64
    )
    block_size: int | None = option(
        None, "tokens per KV block; by default what the worker prefers", minimum=1, maximum=256
    )
    max_model_len: int | None = option(
        None, "longest sequence in tokens, prompt and output together", minimum=1
    )
    max_num_seqs: int = option(128, "sequences that run at once", minimum=1, maximum=65536)
    max_num_batched_tokens: int = option(512, "tokens of one iteration", minimum=1, maximum=1 << 20)
    prefill_chunk: int | None = option(
        None, "tokens of one prompt per iteration; by default the whole token budget", minimum=1
    )
    pipeline_depth: int = option(2, "plans in flight: 1 or 2", minimum=1, maximum=2)
    watermark: float = option(
        0.01, "share of blocks that admission leaves free", minimum=0.0, maximum=0.5
    )
    preemption: str = option(
        "auto",
        "how a group gives way: its blocks are swapped to CPU memory, or recomputed, or whichever "
        "costs less",
        choices=MODES,
    )
    prefix_caching: bool = option(True, "reuse the blocks of prompts and answers seen before")
    max_pinned: float = option(
        0.5, "share of blocks that registered prefixes may pin", minimum=0.0, maximum=0.95
    )
    max_waiting_requests: int = option(4096, "requests that may wait; more are refused", minimum=1)
    max_waiting_tokens: int = option(
        4 << 20, "prompt tokens that may wait; more are refused", minimum=1
    )
    heartbeat_timeout: float = option(
        10.0, "seconds of silence after which a worker counts as lost", minimum=1.0
    )
    plan_timeout: float = option(
        300.0, "seconds without a result after which a worker counts as hung", minimum=1.0
    )
    lease: float = option(
        30.0, "seconds of silence after which a gateway's requests are freed", minimum=2.0
    )
    log_level: str = option(
        "info", "least severe log lines shown", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        check_exposure(
            "--controlplane-bind",
            self.controlplane_bind,
            "the control plane CURVE keys (--curve-keys FOLDER, which `octavo keygen FOLDER` makes)",
            is_protected=self.curve_keys is not None,
            insecure=self.insecure,
        )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
                f"{self.max_num_seqs}: every running sequence needs a token per iteration"
            )
