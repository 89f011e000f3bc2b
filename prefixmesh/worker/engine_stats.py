"""What an engine tells of itself when it is asked: its requests, its pages on both tiers, its speed, and what happened since its start."""

import msgspec

from prefixmesh.cache.ledger import LedgerRow


class AdapterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's adapters are, and what happened to them since its start."""

    names: int = 0
    """That requests may have."""

    resident: int = 0
    """Contents whose weights are in the device's memory."""

    resident_bytes: int = 0
    """Of these, and of those that are being read."""

    waiting_requests: int = 0
    """Requests that wait for weights."""

    loads: int = 0
    """Weights read into memory, at a first use or again."""

    failed_loads: int = 0
    evictions: int = 0
    """Weights that gave way to others'."""


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What moved between the tiers since the start, and what lies beyond the device now. All 0 without a host tier."""

    host_total_pages: int = 0
    host_free_pages: int = 0
    host_evictable_pages: int = 0
    host_protected_pages: int = 0
    """Cached, and read by a copy, or kept by a pin. What a backup is filling is neither free nor cached."""

    backed_up_tokens: int = 0
    dropped_tokens: int = 0
    """Not backed up: the queue was full, or the host had no room."""

    loaded_back_tokens: int = 0
    fetched_tokens: int = 0
    """From the disk."""

    recomputed_tokens: int = 0
    """A lower tier had them, and they were computed: cheaper, no page for them, or a copy that failed or took too long."""

    failed_copies: int = 0
    copies_in_flight: int = 0
    disk_tokens: int = 0
    disk_bytes: int = 0
    disk_written_tokens: int = 0
    disk_dropped_tokens: int = 0
    """Not written: the queue was full, the folder's bound has no room for it, or the disk takes no more."""

    disk_bad_files: int = 0


class PinCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is pinned in the cache, and what that takes. All 0 where nothing can be."""

    pins: int = 0
    """Ids on all tiers."""

    pinned_pages: int = 0
    """Device pages that are cached and that a pin keeps there, each once."""

    charged_pages: int = 0
    """Device pages of all wishes, cached or missing, each counted once a pin."""

    budget_pages: int = 0
    """The most that those may be."""

    host_pinned_pages: int = 0
    host_charged_pages: int = 0
    version: int = 0
    """Rises whenever pins or what they hold change."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """State of the engine, for Describe and metrics."""

    running: int
    queued: int
    total_pages: int
    free_pages: int
    evictable_pages: int
    protected_pages: int
    prefill_tokens_per_s: float
    decode_step_ms: float
    cache: LedgerRow
    """What all prompts since the start have found, by tier, and missed, by cause. For operators: no caller may see causes."""

    double_releases: int
    """Receipts released twice: a bug that was survived."""

    steps: int
    preemptions: int = 0
    """How often a running request had to give way for want of pages; it resumed, or ended, later."""

    evicted_pages: int = 0
    """Cached pages that were given up for others."""

    uncached_tokens: int = 0
    """Tokens of running and waiting requests that are still to be computed before their answers go on. What several who wait share
    is counted for each, so that it is at most too much."""

    uncached_squares: int = 0
    """The sum of ``b**2 - a**2`` over those requests, of which the tokens from ``a`` to ``b`` are to be computed."""

    answer_tokens: int = 0
    """Mean length of the answers that ended last; 0 before the first."""

    token_interval_ms: float = 0.0
    """Of steps in which answers were decoded, with all that was computed in them; as measured, 0 before."""

    prefill_ms_per_token: float = 0.0
    prefill_ms_per_token2: float = 0.0
    """As measured, 0 before: the tokens from ``a`` to ``b`` of a prompt take ``first * (b - a) + second * (b**2 - a**2)``."""

    rated_prefills: int = 0
    """How often that was measured, the profile at start counted in."""

    load_back_ms_per_token: float = 0.0
    """From the host to the device, as measured; 0 before, and without a host tier."""

    tiers: TierCounts = TierCounts()

    pins: PinCounts = PinCounts()

    adapters: AdapterCounts = AdapterCounts()

    resident_adapters: tuple[str, ...] = ()
    """Digests of those whose weights are in the device's memory, sorted."""

    adapter_load_ms: float = 0.0
    """Until an adapter's weights can be used, as measured; 0 before."""
