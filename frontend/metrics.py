"""What the gateway counts.

The histograms have vLLM's names, where they mean the same, so that its dashboards show them.
"""

from collections.abc import Callable

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from octavo.frontend.requests import Usage

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)


class Metrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self._queue = Histogram(
            "vllm:request_queue_time_seconds",
            "From the request's arrival to the first plan that computes it",
            buckets=_SLOW,
            registry=registry,
        )
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_SLOW,
            registry=registry,
        )
        self._each = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Between output tokens, mean of a request",
            buckets=_FAST,
            registry=registry,
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request's arrival to its end",
            buckets=_SLOW,
            registry=registry,
        )
        self._prompt = Counter("octavo_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter(
            "octavo_prompt_tokens_cached",
            "Prompt tokens that came from the prefix index",
            registry=registry,
        )
        self._generated = Counter("octavo_generation_tokens", "Output tokens", registry=registry)
        self._requests = Counter(
            "octavo_requests", "Requests by how they ended", ["finished_reason"], registry=registry
        )

        self._unauthenticated = Counter(
            "octavo_unauthenticated_calls", "Calls without a valid API key", ["api"], registry=registry
        )

    def unauthenticated(self, api: str) -> None:
        """A call over "grpc" or "http" was refused for want of a key."""
        self._unauthenticated.labels(api).inc()

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A figure that is read when somebody asks."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def queued(self, seconds: float) -> None:
        """A request has waited so long."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def request_ended(self, reason: str, usage: Usage, seconds: float) -> None:
        """`reason`: "stop", "length", "abort" or "error"."""
        self._requests.labels(reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._whole.observe(seconds)

    def token_pace(self, seconds: float) -> None:
        """Mean seconds per output token after the first."""
        self._each.observe(seconds)
