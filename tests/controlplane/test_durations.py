"""What was observed is in the histograms whenever somebody reads them, and once."""

import threading

from prometheus_client import CollectorRegistry, generate_latest

from octavo.controlplane.durations import Durations, DurationsCollector


def test_a_duration_counts_in_every_bucket_that_reaches_it() -> None:
    durations = Durations((0.25, 0.5, 1.0))
    for seconds in (0.125, 0.25, 0.375, 2.0):
        durations.observe(seconds)
    durations.fold()
    durations.observe(1.0)
    buckets, total = durations.totals()
    assert buckets == [("0.25", 2), ("0.5", 3), ("1.0", 4), ("+Inf", 5)]
    assert total == 3.75
    assert durations.totals() == (buckets, total)


def test_nothing_observed_is_an_empty_histogram() -> None:
    assert Durations((1.0,)).totals() == ([("1.0", 0), ("+Inf", 0)], 0.0)


def test_nothing_is_lost_between_threads() -> None:
    durations = Durations((1.0,))
    readers = [threading.Thread(target=_read, args=(durations,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(20_000):
        durations.observe(0.5)
    for reader in readers:
        reader.join()
    assert durations.totals() == ([("1.0", 20_000), ("+Inf", 20_000)], 10_000.0)


def _read(durations: Durations) -> None:
    for _ in range(200):
        durations.totals()


def test_the_registry_exports_them_with_and_without_a_label() -> None:
    registry, durations = CollectorRegistry(), Durations((1.0,))
    durations.observe(0.5)
    registry.register(DurationsCollector("parts", "Parts", {"pack": durations}, label="phase"))
    registry.register(DurationsCollector("whole", "Whole", {"": durations}))
    text = generate_latest(registry).decode()
    assert 'parts_bucket{le="1.0",phase="pack"} 1.0' in text
    assert 'parts_count{phase="pack"} 1.0' in text
    assert 'whole_bucket{le="+Inf"} 1.0' in text
    assert "whole_sum 0.5" in text
