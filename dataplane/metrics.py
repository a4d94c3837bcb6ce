"""What a worker counts."""

import prometheus_client

from octavo.proto.plan import Plan, Timings


class WorkerMetrics:
    """Counters and gauges of one worker, in a registry of their own. Written by the main thread."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        counter, gauge = prometheus_client.Counter, prometheus_client.Gauge
        self._plans = counter("octavo_worker_plans", "Plans run", registry=self.registry)
        self._tokens = counter(
            "octavo_worker_tokens", "Tokens computed", ["kind"], registry=self.registry
        )
        self._seconds = counter(
            "octavo_worker_seconds", "Seconds spent on plans", ["phase"], registry=self.registry
        )
        self.faults = counter(
            "octavo_worker_faults", "Plans that could not be run", registry=self.registry
        )
        self.stale_plans = counter(
            "octavo_worker_stale_plans", "Plans of another epoch, dropped", registry=self.registry
        )
        self.refused_frames = counter(
            "octavo_worker_refused_frames", "Frames that are no plan", registry=self.registry
        )
        self._pool_blocks = gauge(
            "octavo_worker_pool_blocks", "Blocks of each pool", ["pool"], registry=self.registry
        )
        self.live_slots = gauge(
            "octavo_worker_live_slots", "Slots that hold a sequence", registry=self.registry
        )

    def count_plan(self, plan: Plan, timings: Timings) -> None:
        """Counts a plan that was run."""
        self._plans.inc()
        self._tokens.labels("decode").inc(len(plan.decode_slots))
        self._tokens.labels("prefill").inc(int(plan.chunk_lengths.sum()))
        for phase in ("apply", "forward", "sample"):
            self._seconds.labels(phase).inc(getattr(timings, phase))

    def set_pools(self, num_blocks: int, num_cpu_blocks: int) -> None:
        """Shows the sizes of the pools."""
        self._pool_blocks.labels("device").set(num_blocks)
        self._pool_blocks.labels("swap").set(num_cpu_blocks)
