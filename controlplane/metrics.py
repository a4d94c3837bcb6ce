"""The control plane's figures for Prometheus, read from its state when they are asked for."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from octavo.controlplane.counters import Counters
from octavo.controlplane.durations import Durations, DurationsCollector
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import OrderedGroups
from octavo.proto.session import Info

PHASES = ("schedule", "pack", "wait", "process", "publish")
_PHASE_BUCKETS = tuple(0.0001 * 2**power for power in range(14))
_PLAN_BUCKETS = tuple(0.001 * 2**power for power in range(16))


class Metrics:
    """Histograms that the server loop feeds, and the registry that holds everything."""

    def __init__(
        self,
        info: Callable[[], Info],
        counters: Counters,
        refused_frames: Mapping[str, int],
        refused_peers: Mapping[tuple[str, str], int],
    ) -> None:
        """`refused_frames` by port, `refused_peers` by port and reason."""
        self.registry = CollectorRegistry()
        self.registry.register(_StateCollector(info, counters, refused_frames, refused_peers))
        self.token_share = self._gauge(
            "octavo_kv_token_share", "Share of the held KV memory that holds tokens"
        )
        self.blocks_saved = self._gauge(
            "octavo_kv_blocks_saved", "Blocks that sequences would hold more if they shared none"
        )
        self.oldest = Gauge(
            "octavo_queue_oldest_seconds",
            "Age of the oldest group in a queue",
            ["state"],
            registry=self.registry,
        )
        self.phase = {phase: Durations(_PHASE_BUCKETS) for phase in PHASES}
        self.plan_seconds = Durations(_PLAN_BUCKETS)
        for collector in self._durations():
            self.registry.register(collector)

    def _durations(self) -> Iterator[DurationsCollector]:
        phases = "Time of an iteration's parts on the control plane"
        yield DurationsCollector("octavo_iteration_seconds", phases, self.phase, label="phase")
        plans = "From a plan's departure to its result's arrival"
        yield DurationsCollector("octavo_plan_seconds", plans, {"": self.plan_seconds})

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def look_at(self, schedulers: Sequence[Scheduler], waiting: OrderedGroups) -> None:
        """Takes in what changes with every iteration, from time to time."""
        for durations in (*self.phase.values(), self.plan_seconds):
            durations.fold()
        usages = [scheduler.blocks.usage(scheduler.slots.computed) for scheduler in schedulers]
        sizes = [scheduler.shape.block_size for scheduler in schedulers]
        held = sum(usage.physical * size for usage, size in zip(usages, sizes, strict=True))
        self.token_share.set(sum(usage.tokens for usage in usages) / held if held else 1.0)
        self.blocks_saved.set(sum(usage.logical - usage.physical for usage in usages))
        self._set_oldest("waiting", [waiting, *(scheduler.waiting for scheduler in schedulers)])
        self._set_oldest("preempted", [scheduler.preempted for scheduler in schedulers])

    def _set_oldest(self, state: str, queues: Sequence[OrderedGroups]) -> None:
        firsts = [first for queue in queues if (first := queue.first()) is not None]
        arrival = min((first.key.arrival for first in firsts), default=None)
        self.oldest.labels(state).set(max(0.0, time.time() - arrival) if arrival is not None else 0.0)


class _StateCollector(Collector):
    def __init__(
        self,
        info: Callable[[], Info],
        counters: Counters,
        refused_frames: Mapping[str, int],
        refused_peers: Mapping[tuple[str, str], int],
    ) -> None:
        self._info, self._counters = info, counters
        self._refused_frames, self._refused_peers = refused_frames, refused_peers

    def collect(self) -> Iterable[Metric]:
        info = self._info()
        yield from _queue_metrics(info)
        yield from _gang_metrics(info)
        yield from _work_metrics(self._counters)
        yield from _block_metrics(self._counters)
        yield from _loss_metrics(self._counters)
        yield from self._refusals()

    def _refusals(self) -> Iterator[Metric]:
        frames = CounterMetricFamily("octavo_frames_refused", "Frames refused", labels=["socket"])
        for socket, count in list(self._refused_frames.items()):
            frames.add_metric([socket], count)
        yield frames
        labels = ["socket", "reason"]
        peers = CounterMetricFamily("octavo_peers_refused", "Connections refused", labels=labels)
        for names, count in list(self._refused_peers.items()):
            peers.add_metric(names, count)
        yield peers


def _queue_metrics(info: Info) -> Iterator[Metric]:
    groups = GaugeMetricFamily("octavo_sequence_groups", "Sequence groups by state", labels=["state"])
    groups.add_metric(["waiting"], info.waiting)
    groups.add_metric(["preempted"], info.preempted)
    groups.add_metric(["running"], info.running)
    yield groups
    yield GaugeMetricFamily("octavo_ready", "Whether some gang can serve", value=int(info.ready))


def _gang_metrics(info: Info) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "octavo_kv_blocks", "KV blocks by pool and state", labels=["gang", "pool", "state"]
    )
    epoch = GaugeMetricFamily("octavo_gang_epoch", "Epoch of a gang", labels=["gang"])
    for gang in info.gangs:
        epoch.add_metric([str(gang.gang)], gang.epoch)
        for name, pool in (("device", gang.device_pool), ("cpu", gang.swap_pool)):
            for state in ("free", "cached", "pinned", "used"):
                blocks.add_metric([str(gang.gang), name, state], getattr(pool, state))
    yield blocks
    yield epoch


def _work_metrics(counters: Counters) -> Iterator[Metric]:
    yield CounterMetricFamily("octavo_plans", "Plans sent", value=counters.plans)
    preemptions = CounterMetricFamily("octavo_preemptions", "Groups preempted", labels=["kind"])
    for kind, count in counters.preemptions.items():
        preemptions.add_metric([kind], count)
    yield preemptions
    tokens = CounterMetricFamily("octavo_scheduled_tokens", "Tokens in rows of plans", labels=["kind"])
    tokens.add_metric(["prefill"], counters.prefill_tokens)
    tokens.add_metric(["decode"], counters.decode_tokens)
    yield tokens
    yield CounterMetricFamily(
        "octavo_prefix_hit_tokens",
        "Tokens whose KV was found instead of computed",
        value=counters.prefix_hit_tokens,
    )


def _block_metrics(counters: Counters) -> Iterator[Metric]:
    swapped = CounterMetricFamily("octavo_swapped_blocks", "Blocks swapped", labels=["direction"])
    swapped_bytes = CounterMetricFamily("octavo_swapped_bytes", "Bytes swapped", labels=["direction"])
    for direction, count in counters.swapped_blocks.items():
        swapped.add_metric([direction], count)
        swapped_bytes.add_metric([direction], counters.swapped_bytes[direction])
    yield swapped
    yield swapped_bytes
    ratio = SummaryMetricFamily(
        "octavo_sharing_ratio", "Entries of block tables / blocks held, of each plan"
    )
    ratio.add_metric([], counters.sharing_ratio_count, counters.sharing_ratio_sum)
    yield ratio
    yield CounterMetricFamily(
        "octavo_copied_blocks", "Blocks copied on write", value=counters.copied_blocks
    )


def _loss_metrics(counters: Counters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "octavo_workers_lost", "Workers that died, fell silent or hung", value=counters.lost_workers
    )
    yield CounterMetricFamily(
        "octavo_rank_disagreements",
        "Plans for which the ranks of a gang drew different tokens",
        value=counters.disagreements,
    )
    yield CounterMetricFamily(
        "octavo_requests_that_kill_workers",
        "Requests failed because workers were lost while they ran alone",
        value=counters.failed_suspects,
    )
    yield CounterMetricFamily(
        "octavo_cancels_freed", "Cancelled groups whose slots were freed", value=counters.cancels_freed
    )
    yield GaugeMetricFamily(
        "octavo_cancel_to_free_plans_max",
        "Most plans that ran between a cancel and the plan that freed its slots",
        value=counters.max_cancel_to_free_plans,
    )
