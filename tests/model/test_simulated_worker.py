"""A worker in simulated time: the real engine and cache under traffic, followed over a failing network. Answers are right, views come to
rest equal, and one seed is one run."""

import random

import pytest

from prefixmesh.cache.tier import Tier
from prefixmesh.proto.cache_news import News
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim import simulated_news
from prefixmesh.sim.faults import Fault, FaultKind, FaultScript
from prefixmesh.sim.network import LinkQuality
from tests.support.simulated_views import Scene

QUIET_S = 2.0
"""Long enough for all requests to end, to notice what was missed, and to be sent a snapshot."""

SHAKY = LinkQuality(delay_s=0.002, jitter_s=0.01, late=0.05, late_s=0.2)


def be_busy(scene: Scene, requests: int, rng: random.Random, *, troubles: bool) -> None:
    """Traffic; with ``troubles`` a flush, a crash, a cut or a mended link now and then."""
    for _ in range(requests):
        scene.sim.run_for(rng.expovariate(60.0))
        choice = rng.random()
        if choice < 0.85 or not troubles:
            scene.ask(rng)
        elif choice < 0.88:
            scene.worker.flush()
        elif choice < 0.9:
            scene.worker.crash()
            scene.sim.call_later(0.05, scene.worker.start)
        elif choice < 0.95:
            scene.network.cut("worker", "router", silently=rng.random() < 0.5)
        else:
            scene.network.mend("worker", "router")


def come_to_rest(scene: Scene) -> None:
    scene.network.mend("worker", "router")
    scene.network.set_quality(LinkQuality())
    scene.sim.run_for(QUIET_S)


def check(scene: Scene) -> None:
    assert scene.differs() == ""
    assert scene.view.trust(scene.sim.now) is Trust.EXACT
    scene.taker.index.check_invariants()
    assert scene.worker.life is not None
    scene.worker.life.engine.core.check_invariants()
    for asked in scene.asked:
        assert asked.end in ("length", "broken")
        if asked.end == "length":
            assert asked.tokens == asked.expected
        else:
            assert asked.tokens == asked.expected[: len(asked.tokens)]


def check_seed(seed: int, rounds: int, requests: int = 60) -> Scene:
    scene = Scene(seed, quality=SHAKY, host_ratio=(0.0, 3.0, 0.5)[seed % 3])
    rng = scene.sim.fork_rng("traffic")
    for _ in range(rounds):
        scene.network.set_quality(SHAKY)
        be_busy(scene, requests, rng, troubles=True)
        come_to_rest(scene)
        check(scene)
    return scene


def test_views_equal_the_caches_of_real_engines_after_faults_of_a_few_seeds() -> None:
    for seed in range(2):
        check_seed(seed, rounds=1)


@pytest.mark.slow
def test_views_equal_the_caches_of_real_engines_after_any_faults() -> None:
    scenes = [check_seed(seed, rounds=2) for seed in range(100, 104)]
    # Else nothing was tried.
    assert sum(scene.watch.streams for scene in scenes) > 2 * len(scenes)
    assert sum(asked.end == "broken" for scene in scenes for asked in scene.asked) > 0
    assert sum(bool(asked.cached) for scene in scenes for asked in scene.asked) > 0


def test_a_good_stream_needs_no_snapshot_but_the_first_whatever_the_scheduler_does() -> None:
    scene = Scene(0)
    be_busy(scene, 60, random.Random(0), troubles=False)
    come_to_rest(scene)
    check(scene)
    assert sum(scene.view.causes.values()) == 0
    assert scene.watch.streams == 1
    assert scene.worker.life is not None
    assert scene.worker.life.engine.core.stats().evicted_pages > 0


def test_one_seed_is_one_run() -> None:
    def run(seed: int) -> tuple[object, ...]:
        scene = check_seed(seed, rounds=1, requests=25)
        ends = [(asked.end, asked.cached) for asked in scene.asked]
        return scene.sim.calls, scene.sim.now, repr(scene.view), ends

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_steps_take_virtual_time_and_are_told_when_it_is_over() -> None:
    scene = Scene(0, faults=FaultScript([Fault(kind=FaultKind.DELAY, amount=1000.0)]))
    asked = scene.ask_for(list(range(50)), 3)
    scene.sim.run_until(1.0)
    assert (asked.cached, asked.tokens) == (None, [])
    scene.sim.run_until(1.1)
    assert (asked.cached, asked.tokens) == (0, asked.expected[:1])
    scene.sim.run_until(3.1)
    assert (asked.end, asked.tokens) == ("length", asked.expected)


def test_crash_breaks_all_streams_and_the_next_life_begins_empty() -> None:
    scene = Scene(0, faults=FaultScript([Fault(kind=FaultKind.CRASH, at_s=1.0, for_s=1.0)]))
    first = scene.ask_for(list(range(50)), 3)
    scene.sim.run_until(0.99)
    second = scene.ask_for(list(range(50)), 1000)
    assert scene.worker.life is not None
    before = scene.worker.life.incarnation
    scene.sim.run_until(1.5)
    assert (first.end, second.end, second.cached) == ("length", "broken", 49)
    assert scene.ask_for(list(range(50)), 3).end == ""
    scene.sim.run_until(1.6)
    assert scene.asked[-1].end == "broken"
    scene.sim.run_until(2.5)
    again = scene.ask_for(list(range(50)), 3)
    scene.sim.run_until(4.0)
    assert (again.end, again.cached) == ("length", 0)
    assert scene.worker.life.incarnation != before
    check(scene)


def test_a_reader_that_takes_nothing_of_its_snapshot_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_news, "PART_BLOCKS", 1)
    scene = Scene(0)
    scene.ask_for([place % 50 for place in range(200)], 3)
    scene.sim.run_for(QUIET_S)
    news: list[News] = []
    stream = scene.network.open_stream("worker", "reader", news.append, lambda: None, buffer=1)
    stream.pause()
    scene.worker.watch(stream, None, 0.1, "")
    scene.sim.run_for(QUIET_S)
    assert not stream.is_open
    check(scene)


def host_blocks(scene: Scene) -> int:
    return len(scene.taker.index.held(scene.view.slot, Tier.HOST))


def test_a_view_never_shows_more_on_the_host_than_has_room_there_and_ends_with_what_is() -> None:
    """F26: a host tier filled beyond its capacity by a real engine's backups, many of which fail."""
    troubles = [
        Fault(kind=FaultKind.COPY_FAIL, at_s=0.5, for_s=0.3),
        Fault(kind=FaultKind.COPY_DELAY, at_s=1.0, for_s=0.5, amount=100.0),
    ]
    scene = Scene(0, faults=FaultScript(troubles), host_ratio=0.5)
    rng = random.Random(0)
    for number in range(110):
        scene.sim.run_for(rng.expovariate(40.0))
        # None begins like another, so that no two blocks have tokens in common.
        scene.ask_for([number % 60, number // 60, *([7] * rng.randrange(60, 250))], rng.randrange(1, 40))
        assert host_blocks(scene) * 64 <= 1000
    assert scene.worker.life is not None
    tiers = scene.worker.life.engine.core.stats().tiers
    assert tiers.host_free_pages < 64, "it was never full"
    assert tiers.backed_up_tokens > 2 * 1000
    come_to_rest(scene)
    check(scene)
    assert host_blocks(scene) > 0
    assert scene.worker.life is not None
    assert scene.worker.life.engine.core.stats().tiers.failed_copies > 0


def test_an_idle_worker_completes_its_backups_and_its_flush_is_believed() -> None:
    """F54, F26."""
    scene = Scene(0, host_ratio=2.0)
    asked = scene.ask_for(list(range(64)) * 3, 3)
    scene.run_until(lambda: asked.end == "length")
    scene.sim.run_for(2.0)
    assert scene.worker.life is not None
    tiers = scene.worker.life.engine.core.stats().tiers
    assert (tiers.copies_in_flight, tiers.host_protected_pages) == (0, 0)
    assert tiers.backed_up_tokens == 3 * 64 + 2
    assert host_blocks(scene) == 3
    scene.worker.flush()
    scene.sim.run_for(1.0)
    assert host_blocks(scene) == 0
    check(scene)


def test_lies_about_sums_are_found_out_and_the_truth_is_believed_again() -> None:
    scene = Scene(0, faults=FaultScript([Fault(kind=FaultKind.WRONG_SUMS, at_s=1.0, for_s=1.0)]))
    scene.ask_for(list(range(50)) * 3, 3)
    scene.sim.run_until(0.9)
    assert scene.view.trust(scene.sim.now) is Trust.EXACT
    scene.sim.run_until(1.9)
    assert scene.view.trust(scene.sim.now) is not Trust.EXACT
    assert scene.view.causes["sums_differ"] > 0
    scene.sim.run_until(2.5)
    check(scene)


def test_silence_makes_a_view_stale_while_requests_are_served() -> None:
    scene = Scene(0, faults=FaultScript([Fault(kind=FaultKind.SILENCE, at_s=1.0, for_s=2.0)]))
    scene.sim.run_until(1.1)
    asked = scene.ask_for(list(range(64)) * 3, 3)
    scene.sim.run_until(2.0)
    assert asked.end == "length"
    assert scene.view.trust(scene.sim.now) is not Trust.EXACT
    assert not scene.taker.index.held(scene.view.slot, Tier.DEVICE)
    scene.sim.run_until(4.0)
    check(scene)
