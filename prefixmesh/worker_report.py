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
    """Cached, and locked by a running request, a pin or a copy on its way, or kept by its payer's floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One report. What it says of the cache is of the moment at which it was made; the engine's figures are the newest it has told by
    then, and 0 before the first."""

    summary: CacheSummary
    device_pool: PagePool = PagePool()
    host_pool: PagePool | None = None
    """None from a worker without a host tier: what its device gives up is gone."""

    running_requests: int = 0
    queued_requests: int = 0
    uncached_tokens: int = 0
    """To be computed before the answers of running and queued requests go on."""

    uncached_squares: int = 0
    """The sum of ``b**2 - a**2`` over the requests of which the tokens from ``a`` to ``b`` are that: what the second part of the prefill's
    curve counts by. 0 from workers that do not tell."""

    answer_tokens: int = 0
    """Mean length of the answers that ended last; 0 before the first, and from workers that do not tell."""

    token_interval_ms: float = 0.0
    """From one token of an answer to its next, lately: a decode step, and what of others' prefills was computed in it. Measured; 0 where
    nothing was measured yet, and from workers that do not tell."""

    prefill_ms_per_token: float = 0.0
    prefill_ms_per_token2: float = 0.0
    """One curve: to compute the tokens from ``a`` to ``b`` of a prompt takes ``first * (b - a) + second * (b**2 - a**2)`` milliseconds.
    Measured; 0 where nothing was measured yet, and the second where growth cannot be told from none."""

    rated_prefills: int = 0
    """How often it has measured that, its profile at start counted in: while it stays, the measurement becomes old. 0 from workers that do not
    tell."""

    decode_step_ms: float = 0.0
    """Measured; 0 where nothing was measured yet."""

    load_back_ms_per_token: float = 0.0
    """From the host tier to the device. Measured; 0 where nothing was measured yet, or there is no host tier."""

    pins_version: int = 0
    """Counts changes of the worker's pins and of what they hold; 0 from workers that do not tell."""

    copy_ms_per_token: float = 0.0
    """From another worker: measured, or guessed before anything was; 0 where it cannot be, and from workers that do not tell."""

    adapter_load_ms: float = 0.0
    """Until an adapter's weights can be used. Measured; 0 where nothing was measured yet."""

    resident_adapters: tuple[str, ...] = ()
    """Digests of the adapters whose weights are in the device's memory."""

    draining: bool = False
    """Takes nothing new."""

    unix_ms: int = 0
    """The worker's clock, in milliseconds since 1970: what tickets expire by. 0 from workers that do not tell."""

    accepted: tuple[str, ...] = ()
    """Requests of the reader's router (by their tickets' ids) that were taken in since its last report; in the first, all that run."""

    prefilled: tuple[str, ...] = ()
    """Those whose first token was computed since then."""

    ended: tuple[str, ...] = ()
    """Those that ended since then, however. One that came and went in between is in each list."""

    own_requests: int = 0
    """Requests of the reader's router that are in the worker now, these changes counted in."""
