"""The field's cases of state, restarts and events, F23 to F26, in simulated fleets: several routers that follow several workers.

Beside the tests of one view alone, here each router hears each worker over a link of its own, and what is wrong with one of them must be
mended there, once, and change nothing anywhere else.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefixmesh.proto.cache_news import EventBatch
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim.network import LinkQuality
from prefixmesh.sim.simulated_link import SimulatedLink
from prefixmesh.sim.simulated_question import Question, as_route_request
from tests.support.field_fleet import BLOCK, REPORTED_S, SPEC, CaseFleet, question

PROMPT_TOKENS = 256
LOSES = LinkQuality(loss=1.0)


def fleet(workers: int, routers: int, *, seed: int = 0) -> CaseFleet:
    return CaseFleet(replace(SPEC, workers=workers, routers=routers, seed=seed))


def prompt(worker: str, number: int) -> Question:
    return question((f"{worker} prompt {number}", PROMPT_TOKENS))


def have_events(case: CaseFleet, first: int, count: int) -> None:
    """Every worker stores so many prompts more, each told of by an event of its own."""
    for number in range(first, first + count):
        before = {worker: case.life(worker).publisher.sequence for worker in case.names}
        case.have_cached_at((worker, prompt(worker, number)) for worker in case.names)
        assert all(case.life(worker).publisher.sequence == before[worker] + 1 for worker in case.names)


def sequences(batch: EventBatch) -> set[int]:
    return {event.sequence for event in batch.events}


# F23


def test_worker_that_is_removed_and_added_again_in_one_instant_is_a_new_one() -> None:
    """F23: load 0, view empty, at once and at the router that did it alone; then what the worker has, and what still runs there."""
    case = fleet(4, 3)
    case.have_cached("worker-1", [prompt("worker-1", 0)])
    asked = [question((f"{number}", 200), answer=100) for number in range(24)]
    running = [case.ask(one) for one in asked]
    case.sim.run_for(REPORTED_S)
    router, others = case.routers[0], case.routers[1:]
    expected = next(
        one for one, answered in zip(asked[::3], running[::3], strict=True) if answered.worker == "worker-1"
    )
    assert case.credited(router, expected) == {"worker-1": 192}
    assert case.entry(router, "worker-1").load.total.in_flight == case.in_flight("worker-1") > 0
    life, endpoint = router.life, Endpoint("worker-1")
    assert life is not None
    life.links[endpoint].close()
    assert life.core.remove_worker(endpoint)
    life.links[endpoint] = SimulatedLink(life, endpoint, case.fleet.workers[endpoint])
    assert case.entry(router, "worker-1").load.total == (0, 0.0, 0.0)
    assert case.credited(router, prompt("worker-1", 0)) == case.credited(router, expected) == {}
    assert case.view(router, "worker-1").view.trust(case.sim.now) is Trust.BLIND
    assert all(case.credited(other, prompt("worker-1", 0)) == {"worker-1": PROMPT_TOKENS} for other in others)
    case.sim.run_for(REPORTED_S)
    assert case.entry(router, "worker-1").load.total.in_flight == case.in_flight("worker-1") > 0
    case.check_views()
    case.run_to_end()
    assert all(not one.error for one in running)
    case.check_ended_well()


@pytest.mark.parametrize("down_s", [0.0, pytest.param(0.002, marks=pytest.mark.slow), 0.2])
def test_worker_that_restarts_under_its_address_holds_nothing_of_its_last_life(down_s: float) -> None:
    """F23: whether anybody saw it go or not: its load is 0 and its view empty within a second, at every router; the other workers' are theirs."""
    case = fleet(4, 2)
    have_events(case, 0, 2)
    for number in range(24):
        case.ask(question((f"{number}", 200), answer=100))
    case.sim.run_for(REPORTED_S)
    assert case.in_flight("worker-2") > 0
    for router in case.routers:
        # Somebody has a ticket for it, of which no stream tells that it is void.
        asked = as_route_request(prompt("worker-2", 0), router.public)
        assert router.core.route(asked, case.sim.now, valid_s=60.0).endpoint == "worker-2"
    worker = case.fleet.workers[Endpoint("worker-2")]
    worker.crash()
    case.sim.run_for(down_s)
    worker.start()
    case.sim.run_for(1.0)
    for router in case.routers:
        assert case.credited(router, prompt("worker-2", 0)) == {}
        assert case.credited(router, prompt("worker-1", 0)) == {"worker-1": PROMPT_TOKENS}
        assert (
            case.entry(router, "worker-2").load.total
            == (case.in_flight("worker-2"), 0.0, 0.0)
            == (0, 0.0, 0.0)
        )
    case.run_to_end()
    case.check_views()
    assert all(
        case.entry(router, worker).load.total.in_flight == 0
        for router in case.routers
        for worker in case.names
    )


# F24


def losing(lost: Callable[[str, EventBatch], bool], workers: int = 4, routers: int = 3) -> CaseFleet:
    """A fleet in which the events that are named never come."""
    case = fleet(workers, routers)
    case.network.set_quality(LOSES)
    case.hear_badly(lost)
    assert not case.resyncs().total()
    return case


def test_one_lost_event_costs_one_resync_there_and_later_events_none() -> None:
    """F24: each router loses another one of each worker's events."""
    case = losing(lambda router, batch: int(router[-1]) + 2 in sequences(batch))
    have_events(case, 0, 8)
    assert set(case.resyncs().values()) == {1}
    case.check_views()
    have_events(case, 8, 4)
    assert set(case.resyncs().values()) == {1}
    case.check_views()


def test_what_one_router_loses_of_one_worker_is_nobody_elses() -> None:
    """F24: one resync in the whole fleet."""
    case = losing(
        lambda router, batch: (
            router == "router-1" and 3 in sequences(batch) and batch.events[0].epoch == epoch
        )
    )
    epoch = case.epoch("worker-2")
    have_events(case, 0, 6)
    assert +case.resyncs() == {("router-1", "worker-2"): 1}
    case.check_views()


def test_of_twenty_events_the_fifth_to_the_seventh_are_lost() -> None:
    """F24: the view equals the worker's own dump. What a report tells of before the next one is lost costs a snapshot of its own."""
    case = losing(lambda router, batch: bool(sequences(batch) & {5, 6, 7}), workers=2, routers=2)
    have_events(case, 0, 20)
    assert set(case.resyncs().values()) <= {1, 2, 3}
    assert all(len(case.held(worker)) == 20 * PROMPT_TOKENS // BLOCK for worker in case.names)
    case.check_views()


def test_events_that_come_twice_are_counted_once() -> None:
    """F24: no resync for any of them."""
    case = fleet(4, 3)
    case.network.set_quality(LinkQuality(duplicate=1.0))
    case.hear_badly(lambda router, batch: True)
    have_events(case, 0, 6)
    assert not case.resyncs().total()
    case.check_views()


def test_events_that_overtake_each_other_are_put_right_and_late_ones_ignored() -> None:
    """F24: those behind one tell that it is missing; when it comes the snapshot has brought it already. On a good network none is asked for."""
    case = fleet(4, 3)
    case.network.set_quality(LinkQuality(late=0.3, late_s=0.4))
    case.hear_badly(lambda router, batch: True)
    have_events(case, 0, 8)
    case.sim.run_for(2.0)
    case.check_views()
    before = case.resyncs()
    assert before.total() > 0
    case.network.set_quality(SPEC.quality)
    case.hear_badly(lambda router, batch: False)
    have_events(case, 8, 3)
    assert not case.resyncs().total()
    case.check_views()


@pytest.mark.parametrize("lost", range(6))
@pytest.mark.parametrize("begins", ["a restart", "a flush"])
@pytest.mark.parametrize("more", [0, 3])
def test_first_events_of_a_new_life_that_are_lost_are_always_noticed(
    lost: int, begins: str, more: int
) -> None:
    """F24: the first k = 0..5 after a restart, whether others come behind them or none; or after a flush, whose own event is the first."""
    epochs: set[int] = set()
    first = 1 if begins == "a restart" else 0

    def is_lost(_: str, batch: EventBatch) -> bool:
        return batch.events[0].epoch not in epochs and min(sequences(batch)) < first + lost

    case = losing(is_lost, workers=1, routers=2)
    epochs.add(case.epoch("worker-0"))
    have_events(case, 0, 2)
    worker = case.fleet.workers[Endpoint("worker-0")]
    if begins == "a flush":
        worker.flush()
    else:
        worker.crash()
        worker.start()
    case.sim.run_for(1.0)  # else the first would be in the snapshot that a new stream begins with
    have_events(case, 2, lost - 1 + first + more)
    case.sim.run_for(1.0)
    assert {count > 0 for count in case.resyncs().values()} == {lost > 0}
    case.check_views()


# F25


def check_router_comes_back(prefixes: int, routers: int, *, prefix_tokens: int, per_s: float) -> None:
    """F25: a router that knew so many prefixes dies, and is started anew at once, and then it is asked as before."""
    case = CaseFleet(replace(SPEC, workers=8, routers=routers))
    for number in range(0, prefixes, 256):
        some = range(number, min(number + 256, prefixes))
        case.have_cached_at((case.names[one % 8], question((f"prefix {one}", prefix_tokens))) for one in some)
    router = case.routers[0]
    assert len(router.core.view.index) == prefixes * prefix_tokens // BLOCK

    def shared(seconds: float) -> tuple[float, list[float]]:
        """Of what is asked in so many seconds: the share found cached, and how long each had to wait for its first token."""
        begun = len(case.asked)

        def make() -> Question:
            known = case.rng.randrange(prefixes)
            return question((f"prefix {known}", prefix_tokens), (f"tail {len(case.asked)}", 32))

        case.poisson(per_s, seconds, make, to_end=False, router=0)
        asked = case.asked[begun:]
        case.run_while(lambda: any(one.ended_at is None for one in asked))
        assert not any(one.error for one in asked)
        return case.cached_share(asked), [
            one.first_token_at - one.asked_at for one in asked if one.first_token_at
        ]

    before, _ = shared(3.0)
    assert before > 0.75
    router.crash()
    router.start()
    case.run_while(lambda: not router.core.registry.ready)
    died_at = case.sim.now
    _, waits_s = shared(2.0)
    assert max(waits_s) < 2.0, "it serves"
    after, _ = shared(3.0)
    assert case.sim.now - died_at < 6.0
    assert after >= 0.9 * before
    case.check_views()


def test_router_that_dies_knows_all_again_and_serves() -> None:
    """F25, with few prefixes, and another router beside it that goes on."""
    check_router_comes_back(60, routers=2, prefix_tokens=640, per_s=8.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_router_that_knew_ten_thousand_prefixes_dies_and_knows_them_again() -> None:
    """F25: serving in 2 s; hit rate back at 90 % within 5 s."""
    check_router_comes_back(10_000, routers=1, prefix_tokens=128, per_s=20.0)


# F26


def test_flush_of_an_idle_worker_is_believed_within_a_second_at_every_router() -> None:
    """F26: nothing is credited to it, and everything to the others as before; then it is no better than who never had it."""
    case = fleet(6, 3)
    have_events(case, 0, 3)
    case.sim.run_for(5.0)  # it is idle
    case.fleet.workers[Endpoint("worker-4")].flush()
    case.sim.run_for(1.0)
    for router in case.routers:
        for worker in case.names:
            expected = {} if worker == "worker-4" else {worker: PROMPT_TOKENS}
            assert case.credited(router, prompt(worker, 1)) == expected
    assert not case.resyncs().total()
    case.check_views()


@pytest.mark.parametrize("ratio", [0.25, pytest.param(1.5, marks=pytest.mark.slow)])
def test_host_tiers_filled_beyond_their_capacity_are_never_seen_fuller_than_they_are(ratio: float) -> None:
    """F26: at every moment, at every router; and what is seen at the end is what is there."""
    pool_tokens = 4096
    engine = replace(
        SPEC.engine, max_total_tokens=pool_tokens, hicache_ratio=ratio, page_size=16, max_running_requests=4
    )
    case = CaseFleet(replace(SPEC, workers=2, routers=3, engine=engine))
    room_blocks = int(ratio * pool_tokens) // BLOCK
    fullest = 0
    for number in range(80):
        case.ask(question((f"{number}", 400), answer=2))
        until = case.sim.now + 0.03
        while case.sim.now < until:
            case.sim.step()
            for router in case.routers:
                for worker in case.names:
                    seen = case.view(router, worker).host_blocks
                    assert seen <= room_blocks
                    fullest = max(fullest, seen)
    case.run_to_end()
    case.sim.run_for(2.0)
    case.check_views()
    assert fullest >= 0.8 * room_blocks, "it was never full"
    backed_up = [case.life(worker).engine.core.stats().tiers.backed_up_tokens for worker in case.names]
    assert min(backed_up) > ratio * pool_tokens, "nothing had to go"
