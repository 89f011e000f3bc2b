"""A router's view of a worker's cache, over a stream that loses, doubles, reorders, delays and breaks: it always comes to rest equal."""

import random

import pytest

from prefixmesh.cache.tier import Tier
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim.network import LinkQuality
from tests.support.view_faults import BLOCK, REPORT_S, ViewScene

QUIET_S = 1.0
"""Long enough to notice, to ask, and to be sent a snapshot."""

FAULTY = LinkQuality(delay_s=0.002, jitter_s=0.01, loss=0.1, duplicate=0.1, late=0.1, late_s=0.2)
GOOD = LinkQuality()


HOST_PAGES = (0, 100, 40)
"""None, more than the device has, and less, so that it overflows all the time."""


def be_busy(scene: ViewScene, steps: int, rng: random.Random, *, troubles: bool = True) -> None:
    """Traffic, with a flush now and then, and with ``troubles`` a restart, a cut or a mended link."""
    for _ in range(steps):
        scene.sim.run_for(rng.expovariate(100.0))
        choice = rng.random()
        if choice < 0.9:
            scene.worker.use()
        elif choice < 0.92:
            scene.worker.flush()
        elif not troubles:
            continue
        elif choice < 0.94:
            scene.worker.restart()
        elif choice < 0.96:
            scene.network.cut("worker", "router", silently=True)
        else:
            scene.network.mend("worker", "router")


def come_to_rest(scene: ViewScene) -> None:
    scene.network.mend("worker", "router")
    scene.network.set_quality(GOOD)
    scene.sim.run_for(QUIET_S)


def check_rest(scene: ViewScene) -> None:
    assert scene.differs() == ""
    assert scene.view.trust(scene.sim.now) is Trust.EXACT
    scene.router.index.check_invariants()
    scene.router.predictions.check_invariants()


def check_seed(seed: int) -> None:
    scene = ViewScene(seed, quality=FAULTY, host_pages=HOST_PAGES[seed % len(HOST_PAGES)])
    rng = scene.sim.fork_rng("traffic")
    for _ in range(4):
        scene.network.set_quality(FAULTY)
        be_busy(scene, 60, rng)
        come_to_rest(scene)
        check_rest(scene)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_views_equal_the_caches_after_any_faults(first: int) -> None:
    for seed in range(first, first + 25):
        check_seed(seed)


@pytest.mark.deep
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_views_equal_the_caches_after_any_faults_with_many_seeds(first: int) -> None:
    for seed in range(1000 + first, 1100 + first):
        check_seed(seed)


def test_views_equal_the_caches_after_faults_of_a_few_seeds() -> None:
    for seed in range(2000, 2005):
        check_seed(seed)


def test_a_good_stream_needs_no_snapshot_but_the_first() -> None:
    scene = ViewScene(0)
    be_busy(scene, 300, random.Random(0), troubles=False)
    come_to_rest(scene)
    check_rest(scene)
    assert sum(scene.view.causes.values()) == 0


@pytest.mark.parametrize("lost", range(6))
def test_events_lost_after_a_restart_are_always_noticed(lost: int) -> None:
    """F24: the first k events of a new life are lost, k = 0..5."""
    scene = ViewScene(lost)
    be_busy(scene, 30, random.Random(0), troubles=False)
    come_to_rest(scene)
    scene.worker.restart()
    for _ in range(lost):
        scene.worker.use()
    scene.sim.run_for(QUIET_S)
    for _ in range(10):
        scene.worker.use()
    scene.sim.run_for(QUIET_S)
    check_rest(scene)


def test_one_lost_event_costs_one_snapshot_and_later_events_none() -> None:
    """F24."""
    scene = ViewScene(1)
    be_busy(scene, 30, random.Random(0), troubles=False)
    come_to_rest(scene)
    scene.network.cut("worker", "router", silently=True)
    while not scene.network.counts.lost:
        scene.worker.use()
    scene.network.mend("worker", "router")
    for _ in range(50):
        scene.worker.use()
        scene.sim.run_for(0.02)
    scene.sim.run_for(QUIET_S)
    check_rest(scene)
    assert sum(scene.view.causes.values()) == 1


def test_a_flush_of_an_idle_worker_is_believed_within_a_report() -> None:
    """F26, on both tiers."""
    scene = ViewScene(2, host_pages=100)
    be_busy(scene, 50, random.Random(0), troubles=False)
    come_to_rest(scene)
    assert all(scene.router.index.held(scene.view.slot, tier) for tier in Tier)
    scene.worker.flush()
    scene.sim.run_for(REPORT_S)
    check_rest(scene)
    assert not any(scene.router.index.held(scene.view.slot, tier) for tier in Tier)


@pytest.mark.parametrize("host_pages", [8, 40])
def test_a_host_filled_beyond_its_capacity_is_never_seen_fuller_than_it_is(host_pages: int) -> None:
    """F26: the view is behind by what is on its way, and at no moment ahead of what has room."""
    scene = ViewScene(4, host_pages=host_pages)
    rng = random.Random(0)
    came, before = 0, 0
    for _ in range(400):
        scene.sim.run_for(rng.expovariate(100.0))
        # One goes on like another or is another from its first token on, so that no two blocks have tokens in common.
        scene.worker.use([rng.randrange(20)] * rng.randrange(1, 6 * BLOCK))
        if rng.random() < 0.1:
            scene.worker.forget()
        held = scene.view.state(Tier.HOST).count
        assert held == len(scene.router.index.held(scene.view.slot, Tier.HOST))
        assert held * BLOCK <= host_pages
        came, before = came + max(0, held - before), held
    assert came * BLOCK > 3 * host_pages, "it was never full"
    come_to_rest(scene)
    check_rest(scene)


def test_silence_makes_a_view_stale_and_news_makes_it_exact_again() -> None:
    scene = ViewScene(3)
    be_busy(scene, 30, random.Random(0), troubles=False)
    come_to_rest(scene)
    scene.network.cut("worker", "router", silently=True)
    scene.sim.run_for(4 * REPORT_S)
    assert scene.view.trust(scene.sim.now) is Trust.STALE
    come_to_rest(scene)
    check_rest(scene)
