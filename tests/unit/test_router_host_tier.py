"""The host tier as a router's core sees it: told by events and reports, counted by its own rate, in every place that counts work."""

from dataclasses import dataclass, field

import pytest

from prefixmesh.cache.tier import Tier
from prefixmesh.errors import OverloadedError
from prefixmesh.router.cost import EVICTED_USE, CandidateTerms
from prefixmesh.router.fleet_columns import ANSWER_TOKENS
from prefixmesh.router.placement import RouteRequest
from prefixmesh.router.worker_view import Need, Trust
from prefixmesh.worker_report import PagePool
from tests.support.simulated_fleet import (
    NOW,
    ToldCache,
    add_ready,
    entry_of,
    facts,
    make_core,
    prompt,
    unique,
)

PREFILL_MS, LOAD_BACK_MS = 0.5, 0.05
TOKENS = 704
BLOCKS, HELD = 10, 640
"""Whole blocks of the prompt that workers hold, and their tokens."""


@dataclass
class Fleet:
    """Workers ``w0``, ``w1``, … that report the same prefill and a host tier each; the last has measured nothing of its host yet."""

    workers: int
    rates: dict[str, float] = field(default_factory=lambda: {"load_back_ms_per_token": LOAD_BACK_MS})

    def __post_init__(self) -> None:
        self.core = make_core(0)
        self.caches = []
        for index in range(self.workers):
            endpoint = add_ready(self.core, f"w{index}", tells=False)
            cache = ToldCache(self.core, endpoint)
            cache.open(NOW)
            self.caches.append(cache)
        self.report()

    def report(self) -> None:
        for cache in self.caches:
            assert (
                cache.report(NOW, prefill_ms_per_token=PREFILL_MS, decode_step_ms=30.0, **self.rates)
                is Need.NOTHING
            )

    def hold(self, worker: int, request: RouteRequest, *tiers: Tier) -> None:
        """A worker holds the prompt's first blocks on these tiers, as it comes to: computed, backed up, evicted."""
        cache, names = self.caches[worker], request.fingerprints[:BLOCKS]
        cache.store(names, NOW)
        cache.back_up(names, NOW)
        for tier in set(Tier) - set(tiers):
            cache.evict(names, NOW, tier)
        self.report()

    def terms(self, request: RouteRequest) -> dict[str, CandidateTerms]:
        return {entry.endpoint: terms for entry, terms in self.core.explain(request, NOW).candidates}

    def chosen(self, request: RouteRequest) -> str:
        return str(self.core.explain(request, NOW).chosen)


REQUEST = prompt(unique(1, TOKENS))


def test_demotion_is_seen_as_the_same_match_on_the_host() -> None:
    """``Removed`` of the device while the host stays: what is matched is the same, and what it costs is its load-back."""
    fleet = Fleet(1)
    fleet.hold(0, REQUEST, Tier.DEVICE, Tier.HOST)
    both = fleet.terms(REQUEST)["w0"]
    assert (both.device_tokens, both.host_tokens, both.load_back_ms) == (HELD, 0, 0.0)
    fleet.caches[0].evict(REQUEST.fingerprints[:BLOCKS], NOW)
    fleet.report()
    demoted = fleet.terms(REQUEST)["w0"]
    assert (demoted.device_tokens, demoted.host_tokens, demoted.counted_tokens) == (0, HELD, HELD)
    assert demoted.load_back_ms == pytest.approx(HELD * LOAD_BACK_MS)
    assert demoted.prefill_ms == both.prefill_ms
    followed = fleet.core.view.get(fleet.caches[0].endpoint)
    assert followed is not None
    assert (followed.trust, followed.blocks, followed.host_blocks) == (Trust.EXACT, 0, BLOCKS)
    fleet.caches[0].evict(REQUEST.fingerprints[:BLOCKS], NOW, Tier.HOST)
    fleet.report()
    assert fleet.terms(REQUEST)["w0"].counted_tokens == 0
    fleet.core.check_invariants()


def test_only_a_part_was_demoted() -> None:
    """An eviction goes from the end: the beginning is on the device, and what follows is loaded back behind it."""
    fleet = Fleet(1)
    fleet.hold(0, REQUEST, Tier.DEVICE, Tier.HOST)
    fleet.caches[0].evict(REQUEST.fingerprints[4:BLOCKS], NOW)
    fleet.report()
    terms = fleet.terms(REQUEST)["w0"]
    assert (terms.device_tokens, terms.host_tokens) == (256, HELD - 256)
    assert terms.load_back_ms == pytest.approx((HELD - 256) * LOAD_BACK_MS)


def test_snapshot_that_a_late_router_gets_has_both_tiers() -> None:
    fleet = Fleet(1)
    fleet.hold(0, REQUEST, Tier.HOST)
    fleet.core.view.ended(fleet.caches[0].endpoint, "test", NOW, is_void=True)
    fleet.caches[0].open(NOW)
    fleet.report()
    assert fleet.terms(REQUEST)["w0"].host_tokens == HELD


def test_at_equal_load_the_devices_holder_comes_first_then_the_hosts_then_anyone() -> None:
    fleet = Fleet(3)
    fleet.hold(1, REQUEST, Tier.HOST)
    assert fleet.chosen(REQUEST) == "w1"
    fleet.hold(2, REQUEST, Tier.DEVICE)
    assert fleet.chosen(REQUEST) == "w2"
    terms = fleet.terms(REQUEST)
    assert terms["w2"].total_ms < terms["w1"].total_ms < terms["w0"].total_ms


def test_holder_on_the_device_that_is_busy_enough_loses_to_one_on_the_host() -> None:
    """Load-back is cheap beside a queue: nothing makes a tier win by itself."""
    fleet = Fleet(2)
    fleet.hold(0, REQUEST, Tier.DEVICE)
    fleet.hold(1, REQUEST, Tier.HOST)
    assert fleet.chosen(REQUEST) == "w0"
    for seed in range(2, 8):
        fleet.core.route(prompt(unique(seed, 4000)), NOW)
        fleet.caches[0].report(
            NOW, prefill_ms_per_token=PREFILL_MS, queued_requests=1, uncached_tokens=4000, **fleet.rates
        )
    assert fleet.chosen(REQUEST) == "w1"


@pytest.mark.parametrize(
    ("rate_ms", "loads"), [(LOAD_BACK_MS, True), (PREFILL_MS - 0.01, True), (PREFILL_MS + 0.01, False)]
)
def test_load_back_never_costs_more_than_to_compute(rate_ms: float, *, loads: bool) -> None:
    """A host that is slower than the arithmetic makes its match worth nothing, and its holder like everybody."""
    fleet = Fleet(2, {"load_back_ms_per_token": rate_ms})
    fleet.hold(1, REQUEST, Tier.HOST)
    terms = fleet.terms(REQUEST)
    whole_ms = TOKENS * PREFILL_MS
    assert terms["w1"].first_token_ms <= terms["w0"].first_token_ms == pytest.approx(whole_ms)
    assert (terms["w1"].host_tokens, terms["w1"].counted_tokens) == (HELD, HELD if loads else 0)
    assert bool(terms["w1"].load_back_ms) is loads


def test_host_tier_that_nobody_has_used_yet_is_used() -> None:
    """Nobody has measured a load-back: what is assumed for it is a part of the prefill, so that the first can be measured."""
    fleet = Fleet(2, {})
    fleet.hold(1, REQUEST, Tier.HOST)
    assert fleet.chosen(REQUEST) == "w1"
    assert 0.0 < fleet.terms(REQUEST)["w1"].load_back_ms < HELD * PREFILL_MS


def test_what_is_booked_for_a_request_has_its_load_back_in_it() -> None:
    """Until it is admitted: by then what it waited for has come, and only what is computed is still to be done."""
    fleet = Fleet(1)
    fleet.hold(0, REQUEST, Tier.HOST)
    placement = fleet.core.route(REQUEST, NOW)
    load = entry_of(fleet.core, "w0").load
    compute_ms, load_back_ms = (TOKENS - HELD) * PREFILL_MS, HELD * LOAD_BACK_MS
    assert load.total.prefill_ms == pytest.approx(compute_ms + load_back_ms)
    assert placement.predicted_first_token_ms == pytest.approx(compute_ms + load_back_ms)
    fleet.core.accepted(placement, HELD, NOW)
    assert load.total.prefill_ms == pytest.approx(compute_ms)
    fleet.core.first_token(placement, NOW)
    assert load.total.prefill_ms == 0.0


def test_hits_on_the_host_are_what_was_predicted() -> None:
    """The forecast of cached tokens is of all tiers; what a disk gave beside them was not known."""
    fleet = Fleet(1)
    fleet.hold(0, REQUEST, Tier.HOST)
    placement = fleet.core.route(REQUEST, NOW)
    assert placement.predicted_cached_tokens == HELD
    fleet.core.accepted(placement, HELD, NOW)
    errors = entry_of(fleet.core, "w0").errors.cached_tokens
    assert (errors.count, errors.bias, errors.size) == (1, 0.0, 0.0)


def test_request_that_cannot_even_be_loaded_back_in_time_is_refused() -> None:
    """What a request needs itself has its load-back in it: the time that is left for waiting is so much less."""
    for rate_ms, is_taken in ((LOAD_BACK_MS, True), (PREFILL_MS - 0.01, False)):
        fleet = Fleet(1, {"load_back_ms_per_token": rate_ms})
        fleet.hold(0, REQUEST, Tier.HOST)
        fleet.caches[0].report(
            NOW,
            prefill_ms_per_token=PREFILL_MS,
            running_requests=1,
            uncached_tokens=400,
            answer_tokens=1,
            token_interval_ms=1.0,
            **fleet.rates,
        )
        # 200 ms of waiting; 32 ms of prefill; 32 or 314 ms of load-back.
        if is_taken:
            assert fleet.core.route(REQUEST, NOW, time_left_s=0.5)
        else:
            with pytest.raises(OverloadedError):
                fleet.core.route(REQUEST, NOW, time_left_s=0.5)


def test_worker_with_a_host_tier_gives_up_its_devices_pages_more_cheaply() -> None:
    """What is demoted costs its load-back when it is asked for again, where another's is computed."""
    fleet = Fleet(2)
    pool = PagePool(total_pages=10_000, free_pages=0, evictable_pages=9_000)
    host = PagePool(total_pages=40_000, free_pages=40_000)
    for cache, host_pool in zip(fleet.caches, (None, host), strict=True):
        cache.core.described(cache.endpoint, facts(cache.endpoint, host_pool=host_pool), NOW)
        cache.report(
            NOW, prefill_ms_per_token=PREFILL_MS, device_pool=pool, host_pool=host_pool, **fleet.rates
        )
    terms = fleet.terms(REQUEST)
    needed = TOKENS + ANSWER_TOKENS
    assert terms["w0"].eviction_ms == pytest.approx(needed * PREFILL_MS * EVICTED_USE)
    assert terms["w1"].eviction_ms == pytest.approx(needed * LOAD_BACK_MS * EVICTED_USE)
    # The host fills up, as reports tell; and another life is without one.
    full = PagePool(total_pages=40_000, free_pages=100, evictable_pages=39_900)
    fleet.caches[1].report(
        NOW, prefill_ms_per_token=PREFILL_MS, device_pool=pool, host_pool=full, **fleet.rates
    )
    both_ms = (needed * LOAD_BACK_MS + (needed - 100) * PREFILL_MS) * EVICTED_USE
    assert fleet.terms(REQUEST)["w1"].eviction_ms == pytest.approx(both_ms)
    fleet.core.described(fleet.caches[1].endpoint, facts("w1", 2), NOW)
    assert not fleet.core.fleet.columns.some_demote
