"""What the machine can do at best, measured in the same run as the figures that stand beside it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.dataplane.engines.choice import set_compute_threads
from octavo.kernels.table import native_kernels

_MATMUL_SIZE = 1536
_COPY_BYTES = 256 * 1024 * 1024  # far more than any cache holds
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Ceilings:
    """Best of several tries."""

    threads: int  # of torch, with which they were measured
    matmul_flops: float  # fp32 operations per second of the fastest matrix product here
    memory_bytes: float  # bytes per second of a copy, read and written, or of reading: the faster


def measure_ceilings(tries: int = 5) -> Ceilings:
    """With as many threads as torch uses now. Takes about two seconds."""
    source = torch.ones(_COPY_BYTES // _FLOAT_BYTES)
    target = torch.empty_like(source)
    copy, read = (fastest(work, tries) for work in (lambda: target.copy_(source), source.sum))
    product = min(fastest(work, tries) for work in _products())
    return Ceilings(
        threads=torch.get_num_threads(),
        matmul_flops=2 * _MATMUL_SIZE**3 / product,
        memory_bytes=max(2 * _COPY_BYTES / copy, _COPY_BYTES / read),
    )


def limits_text(ceilings: Ceilings) -> str:
    """A line below a table whose figures they bound."""
    return (
        f"ceilings, {ceilings.threads} threads: fp32 matrix product "
        f"{ceilings.matmul_flops / 1e9:.0f} GFLOP/s, memory {ceilings.memory_bytes / 1e9:.1f} GB/s"
    )


def _products() -> list[Callable[[], object]]:
    """Ways to multiply matrices; which is faster depends on the CPU."""
    left, right = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE)
    out = torch.empty(_MATMUL_SIZE, _MATMUL_SIZE)
    products: list[Callable[[], object]] = [lambda: torch.mm(left, right, out=out)]
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed = torch.ops.mkldnn._reorder_linear_weight(right, _MATMUL_SIZE)
        linear = torch.ops.mkldnn._linear_pointwise
        products.append(lambda: linear(left, packed, None, "none", [], ""))
    if (native := native_kernels()) is not None:
        set_compute_threads(native, threads := torch.get_num_threads())
        torch.set_num_threads(threads)  # that took torch's
        weight = native.prepare_linear(right)
        products.append(lambda: native.linear(left, weight, None))
    return products


def fastest(work: Callable[[], object], tries: int) -> float:
    """Seconds of the fastest of some tries, after one that is not counted."""
    work()
    return min(_seconds(work) for _ in range(tries))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True)
class ModelCost:
    """What a step of a Llama-family model must compute and read at least.

    Only matrix products and attention count; everything else is small beside them.
    """

    layer_weights: int  # of all layers' matrices
    head_weights: int  # of the matrix that gives logits
    attention_flops: int  # per token and per token that it attends to
    token_bytes: int  # of KV cache per token
    weight_bytes: float = _FLOAT_BYTES  # of each

    @classmethod
    def of(cls, config: dict[str, int], token_bytes: int | None = None) -> "ModelCost":
        """From Hugging Face's configuration; without `token_bytes` the KV cache is float32."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        if token_bytes is None:
            token_bytes = 2 * config["num_hidden_layers"] * kv_heads * head_dim * _FLOAT_BYTES
        projections = 2 * hidden * head_dim * (heads + kv_heads)
        layer = projections + 3 * hidden * config["intermediate_size"]
        return cls(
            layer_weights=config["num_hidden_layers"] * layer,
            head_weights=hidden * config["vocab_size"],
            attention_flops=4 * config["num_hidden_layers"] * heads * head_dim,
            token_bytes=token_bytes,
        )

    def flops(self, tokens: int, logits: int, attended: int) -> int:
        """`attended` is the number of (token, earlier token) pairs."""
        products = 2 * (tokens * self.layer_weights + logits * self.head_weights)
        return products + attended * self.attention_flops

    def bytes_read(self, cached_tokens: int) -> float:
        """Weights once, and the KV cache of the tokens that are attended to."""
        weights = self.layer_weights + self.head_weights
        return weights * self.weight_bytes + cached_tokens * self.token_bytes

    def floor(self, flops: int, bytes_read: float, ceilings: Ceilings) -> float:
        """Seconds that no implementation on this machine could beat."""
        return max(flops / ceilings.matmul_flops, bytes_read / ceilings.memory_bytes)
