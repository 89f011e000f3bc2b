"""What a worker tells about itself at intervals, beside the events of its cache: how busy it is, how fast, and the cache's sums."""

from dataclasses import dataclass

from prefixmesh.cache.events import CacheSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePool:
    """Pages of one tier's pool, by who owns them. All 0: the engine has not told yet."""

    total_pages: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    """Cached and not in use."""

    protected_pages: int = 0
    """Cached, and locked by a running request or kept by its payer's floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One report. What it says of the cache is of the moment at which it was made; the engine's figures are the newest it has told by
    then, and 0 before the first."""

    summary: CacheSummary
    device_pool: PagePool = PagePool()
    running_requests: int = 0
    queued_requests: int = 0
    uncached_tokens: int = 0
    """To be computed before the answers of running and queued requests go on."""

    prefill_ms_per_token: float = 0.0
    """Measured; 0 where nothing was measured yet."""

    decode_step_ms: float = 0.0
    """Measured; 0 where nothing was measured yet."""
