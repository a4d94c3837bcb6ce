"""What a worker counts."""

import prometheus_client

from octavo.dataplane.slots import Slots
from octavo.proto.plan import Plan, Timings


class WorkerMetrics:
    """Counters and gauges of one worker, in a registry of their own. Written by the main thread."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        counter, gauge = prometheus_client.Counter, prometheus_client.Gauge
        self._plans = counter("octavo_worker_plans", "Plans run", registry=self.registry)
        tokens = counter("octavo_worker_tokens", "Tokens computed", ["kind"], registry=self.registry)
        # Looking a label up takes longer than counting.
        self._decoded, self._prefilled = tokens.labels("decode"), tokens.labels("prefill")
        seconds = counter(
            "octavo_worker_seconds", "Seconds spent on plans", ["phase"], registry=self.registry
        )
        self._apply, self._forward, self._sample = map(seconds.labels, ("apply", "forward", "sample"))
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
        self._live_slots = gauge(
            "octavo_worker_live_slots", "Slots that hold a sequence", registry=self.registry
        )

    def count_plan(self, plan: Plan, timings: Timings) -> None:
        """Counts a plan that was run."""
        self._plans.inc()
        self._decoded.inc(len(plan.decode_slots))
        if len(plan.chunk_lengths):
            self._prefilled.inc(int(plan.chunk_lengths.sum()))
        self._apply.inc(timings.apply)
        self._forward.inc(timings.forward)
        self._sample.inc(timings.sample)

    def watch_slots(self, slots: Slots) -> None:
        """From now on these are counted, whenever somebody asks."""
        self._live_slots.set_function(lambda: int(slots.live.sum()))

    def set_pools(self, num_blocks: int, num_cpu_blocks: int) -> None:
        """Shows the sizes of the pools."""
        self._pool_blocks.labels("device").set(num_blocks)
        self._pool_blocks.labels("swap").set(num_cpu_blocks)
