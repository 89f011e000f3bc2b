"""The engine's own figures as Prometheus knows them: what the cache found and missed, pages, steps, speed.

All of them come from one ``Stats``, which the engine makes between two steps, so that they agree with each other: hits and misses
sum to what was asked for, pages to the pool. They are as old as ``prefixmesh_engine_stats_age_seconds`` says.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from prefixmesh.cache.ledger import LedgerRow
from prefixmesh.worker.engine_stats import AdapterCounts, PinCounts, Stats, TierCounts
from prefixmesh.worker.recent_stats import RecentStats


class EngineMetrics(Collector):
    """What ``RecentStats`` holds when it is collected; nothing before the engine has told anything."""

    def __init__(self, recent: RecentStats) -> None:
        self._recent = recent

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of ``docs/metrics.md``."""
        stats, age_s = self._recent.last, self._recent.age_s
        if stats is None or age_s is None:
            return
        yield from _cache_families(stats.cache)
        yield from _load_families(stats)
        yield from _tier_families(stats.tiers, stats.load_back_ms_per_token)
        yield from _pin_families(stats.pins)
        yield from _adapter_families(stats.adapters)
        yield GaugeMetricFamily(
            "prefixmesh_engine_stats_age_seconds",
            "Age of every figure of the engine and the cache on this page.",
            age_s,
        )


def _cache_families(row: LedgerRow) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "prefixmesh_cache_hit_rate",
        "Share of all prompt tokens that were found cached; 0 while none was asked for.",
        row.cache_hit_rate() or 0.0,
    )
    yield CounterMetricFamily(
        "prefixmesh_cache_query_tokens",
        "Prompt tokens looked up, each request once, at its first admission.",
        row.prompt_tokens,
    )
    yield _labelled(
        CounterMetricFamily,
        "prefixmesh_cache_hit_tokens",
        "Prompt tokens found cached, by tier.",
        "tier",
        row.hit_tokens._asdict(),
    )
    yield _labelled(
        CounterMetricFamily,
        "prefixmesh_cache_miss_tokens",
        "Prompt tokens that had to be computed, by cause.",
        "cause",
        row.miss_tokens._asdict(),
    )
    yield CounterMetricFamily("prefixmesh_cache_queries", "Requests that looked up the cache.", row.requests)


def _load_families(stats: Stats) -> Iterator[Metric]:
    cached = stats.evictable_pages + stats.protected_pages
    pages = {
        "free": stats.free_pages,
        "evictable": stats.evictable_pages,
        "protected": stats.protected_pages,
        "private": stats.total_pages - stats.free_pages - cached,
    }
    yield _labelled(
        GaugeMetricFamily, "prefixmesh_kv_pages", "Pages of the KV pool, by who holds them.", "state", pages
    )
    yield GaugeMetricFamily("prefixmesh_engine_running_requests", "Requests in the batch.", stats.running)
    yield GaugeMetricFamily("prefixmesh_engine_queued_requests", "Requests waiting for it.", stats.queued)
    yield CounterMetricFamily("prefixmesh_engine_steps", "Steps computed.", stats.steps)
    yield CounterMetricFamily(
        "prefixmesh_engine_preemptions",
        "Running requests that gave way for want of pages.",
        stats.preemptions,
    )
    yield CounterMetricFamily(
        "prefixmesh_cache_evicted_pages", "Cached pages given up for others.", stats.evicted_pages
    )
    yield CounterMetricFamily(
        "prefixmesh_engine_double_releases",
        "Cache locks released twice: bugs that were survived.",
        stats.double_releases,
    )
    yield GaugeMetricFamily(
        "prefixmesh_engine_prefill_tokens_per_second",
        "Speed of prefill, a moving average.",
        stats.prefill_tokens_per_s,
    )
    yield GaugeMetricFamily(
        "prefixmesh_engine_decode_step_seconds",
        "Time of a decode step, a moving average.",
        stats.decode_step_ms / 1e3,
    )


def _tier_families(tiers: TierCounts, load_back_ms_per_token: float) -> Iterator[Metric]:
    """All 0 on a worker that has no host tier: a page has the same series whatever the worker is."""
    cached = tiers.host_evictable_pages + tiers.host_protected_pages
    yield _labelled(
        GaugeMetricFamily,
        "prefixmesh_host_pages",
        "Pages of the host tier, by who holds them.",
        "state",
        {
            "free": tiers.host_free_pages,
            "evictable": tiers.host_evictable_pages,
            "protected": tiers.host_protected_pages,
            "arriving": tiers.host_total_pages - tiers.host_free_pages - cached,
        },
    )
    yield _labelled(
        CounterMetricFamily,
        "prefixmesh_tier_tokens",
        "Tokens whose KV moved between the tiers, or could have and did not.",
        "move",
        {
            "backed_up": tiers.backed_up_tokens,
            "dropped": tiers.dropped_tokens,
            "loaded_back": tiers.loaded_back_tokens,
            "written": tiers.disk_written_tokens,
            "not_written": tiers.disk_dropped_tokens,
            "fetched": tiers.fetched_tokens,
            "recomputed": tiers.recomputed_tokens,
        },
    )
    yield GaugeMetricFamily("prefixmesh_tier_copies_in_flight", "Copies under way.", tiers.copies_in_flight)
    yield CounterMetricFamily(
        "prefixmesh_tier_failed_copies", "Copies that failed or took too long.", tiers.failed_copies
    )
    yield GaugeMetricFamily(
        "prefixmesh_engine_load_back_tokens_per_second",
        "Speed of KV from the host to the device, a moving average; 0 before the first.",
        1e3 / load_back_ms_per_token if load_back_ms_per_token else 0.0,
    )
    yield GaugeMetricFamily("prefixmesh_disk_tokens", "Tokens whose KV is on the disk.", tiers.disk_tokens)
    yield GaugeMetricFamily(
        "prefixmesh_disk_bytes", "Bytes of all KV files, also of those that are not served.", tiers.disk_bytes
    )
    yield CounterMetricFamily(
        "prefixmesh_disk_bad_files",
        "Files that were not what they should be, and were put away.",
        tiers.disk_bad_files,
    )


def _pin_families(pins: PinCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("prefixmesh_pins", "Pins, by the ids that others chose.", pins.pins)
    yield _labelled(
        GaugeMetricFamily,
        "prefixmesh_pinned_pages",
        "Pages that are cached and that a pin keeps, by tier.",
        "tier",
        {"device": pins.pinned_pages, "host": pins.host_pinned_pages},
    )
    yield _labelled(
        GaugeMetricFamily,
        "prefixmesh_pin_charged_pages",
        "Pages of all pins' prefixes, cached or not, by tier.",
        "tier",
        {"device": pins.charged_pages, "host": pins.host_charged_pages},
    )
    yield GaugeMetricFamily(
        "prefixmesh_pin_budget_pages", "Most pages of the device that those may be.", pins.budget_pages
    )


def _adapter_families(counts: AdapterCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("prefixmesh_adapters", "Adapters that requests may name.", counts.names)
    yield GaugeMetricFamily(
        "prefixmesh_adapters_resident", "Adapters' contents whose weights are in memory.", counts.resident
    )
    yield GaugeMetricFamily(
        "prefixmesh_adapters_resident_bytes",
        "Memory of these, and of those that are being read.",
        counts.resident_bytes,
    )
    yield GaugeMetricFamily(
        "prefixmesh_adapter_waiting_requests", "Requests waiting for weights.", counts.waiting_requests
    )
    yield _labelled(
        CounterMetricFamily,
        "prefixmesh_adapter_loads",
        "Weights read into memory, or not.",
        "result",
        {"loaded": counts.loads, "failed": counts.failed_loads},
    )
    yield CounterMetricFamily(
        "prefixmesh_adapter_evictions", "Weights that gave way to others'.", counts.evictions
    )


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    documentation: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(name, documentation, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
