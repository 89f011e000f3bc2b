"""What workers' reports and events do to the requests that a router has placed: they move them, end them once, and never lose their load."""

from dataclasses import replace

import pytest

from prefixmesh.cache.events import CacheSummary, Cleared
from prefixmesh.ids import Epoch, Incarnation
from prefixmesh.proto.cache_news import EventBatch
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_columns import BOUNDLESS
from prefixmesh.router.fleet_view import LEAST_SILENCE_S
from prefixmesh.router.placement import Placement
from prefixmesh.router.placements import LATE_REPORT_S
from prefixmesh.router.reservation import ReservationState
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_view import Need, Trust
from prefixmesh.worker_report import PagePool, WorkerReport
from tests.support.simulated_fleet import (
    BLOCK,
    NOW,
    ToldCache,
    add_ready,
    believed,
    entry_of,
    facts,
    make_core,
    prompt,
    unique,
)

W0 = Endpoint("w0")
VALID_S = 5.0


class Scene:
    """One worker that tells, and a core."""

    def __init__(self) -> None:
        self.core = make_core(0)
        add_ready(self.core, "w0", tells=False)
        self.cache = ToldCache(self.core, W0)
        self.cache.open(NOW)

    def direct(self, seed: int = 1, tokens: int = 640) -> Placement:
        return self.core.route(prompt(unique(seed, tokens)), NOW, valid_s=VALID_S)

    @property
    def load(self) -> tuple[int, int]:
        """Own requests, and everybody's."""
        load = entry_of(self.core, "w0").load
        return load.in_flight, load.total.in_flight


def state_of(placement: Placement) -> ReservationState:
    return placement.reservation.state


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_reports_alone_carry_a_direct_request_from_ticket_to_end(scene: Scene) -> None:
    placement = scene.direct()
    name = placement.request_id
    assert scene.load == (1, 1)
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(name,), uncached_tokens=640)
    assert state_of(placement) is ReservationState.ACCEPTED
    scene.cache.report(NOW, running_requests=1, own_requests=1, prefilled=(name,))
    assert state_of(placement) is ReservationState.PREFILLED
    assert (scene.load, entry_of(scene.core, "w0").load.total.prefill_ms) == ((1, 1), 0.0)
    scene.cache.store(placement.request.fingerprints, NOW)
    scene.cache.report(NOW, ended=(name,))
    assert (scene.load, placement.reservation.has_ended) == ((0, 0), True)
    assert len(scene.core.view.predictions) == 0, "its events came before"
    assert believed(scene.core, placement.request) == {"w0": 10}
    scene.core.check_invariants()


def test_one_that_came_and_went_between_two_reports_is_in_every_list_and_ends_once(scene: Scene) -> None:
    placement = scene.direct()
    name = placement.request_id
    scene.cache.report(NOW, accepted=(name,), prefilled=(name,), ended=(name,))
    scene.cache.report(NOW, ended=(name,))
    assert scene.load == (0, 0)
    scene.core.check_invariants()


def test_unused_ticket_leaves_no_load_and_no_prediction(scene: Scene) -> None:
    placement = scene.direct()
    scene.core.tick(NOW + VALID_S)
    assert scene.load == (1, 1), "the report that it was used may be on its way"
    scene.core.tick(NOW + VALID_S + LATE_REPORT_S)
    assert (scene.load, believed(scene.core, placement.request)) == ((0, 0), {})
    scene.core.tick(NOW + 100 * VALID_S)
    scene.core.check_invariants()


def test_used_ticket_is_not_ended_by_its_time(scene: Scene) -> None:
    placement = scene.direct()
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(placement.request_id,))
    scene.core.expire(NOW + 10 * VALID_S)
    assert scene.load == (1, 1)
    assert not scene.core.withdraw(placement.request_id, NOW), "and not by its caller"
    assert scene.load == (1, 1)


def test_ticket_that_its_caller_gives_back_is_settled_at_once_and_once(scene: Scene) -> None:
    placement = scene.direct()
    assert scene.core.withdraw(placement.request_id, NOW)
    assert not scene.core.withdraw(placement.request_id, NOW)
    assert not scene.core.withdraw("never given", NOW)
    assert (scene.load, len(scene.core.view.predictions)) == ((0, 0), 0)
    proxied = scene.core.route(prompt(unique(2, 100)), NOW)
    assert not scene.core.withdraw(proxied.request_id, NOW), "nobody gives back what the router carries"


def test_first_report_of_a_stream_ends_what_is_gone_and_nothing_else(scene: Scene) -> None:
    """While nobody listened a direct request ended; one was not used yet, and one passes through the router, which knows its end itself."""
    gone, unused = scene.direct(1), scene.direct(2)
    proxied = scene.core.route(prompt(unique(9, 200)), NOW)
    scene.core.accepted(proxied, 0, NOW)
    names = (gone.request_id, proxied.request_id)
    scene.cache.report(NOW, running_requests=2, own_requests=2, accepted=names)
    scene.core.view.ended(W0, "unavailable", NOW)
    scene.cache.open(NOW)
    assert [p.reservation.has_ended for p in (gone, unused, proxied)] == [True, False, False]
    scene.core.check_invariants()


def test_first_report_names_who_runs_on(scene: Scene) -> None:
    gone, runs = scene.direct(1), scene.direct(2)
    scene.cache.report(NOW, running_requests=2, own_requests=2, accepted=(gone.request_id, runs.request_id))
    scene.core.view.ended(W0, "unavailable", NOW)
    scene.core.fleet.opened(W0, 0.1, NOW)
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(runs.request_id,))
    assert (gone.reservation.has_ended, runs.reservation.has_ended, scene.load) == (True, False, (1, 1))
    scene.cache.report(NOW, running_requests=1, own_requests=1)
    assert not runs.reservation.has_ended, "later reports tell of changes only"


def test_a_life_that_is_over_takes_direct_requests_with_it(scene: Scene) -> None:
    """F23: nobody will tell of them any more; those that the router carries end as their streams do."""
    direct, proxied = scene.direct(1), scene.core.route(prompt(unique(2, 640)), NOW)
    scene.core.accepted(proxied, 0, NOW)
    scene.core.described(W0, facts("w0", incarnation=2), NOW)
    assert (direct.reservation.has_ended, proxied.reservation.has_ended) == (True, False)
    scene.core.failed(proxied, NOW)
    assert scene.load == (0, 0)
    assert believed(scene.core, direct.request) == {}
    scene.core.check_invariants()


def test_news_of_a_former_life_are_not_taken_for_the_present_one(scene: Scene) -> None:
    placement = scene.direct()
    scene.core.described(W0, facts("w0", incarnation=2), NOW)
    again = scene.core.route(placement.request, NOW, valid_s=VALID_S)
    assert scene.cache.report(NOW, running_requests=9, ended=(again.request_id,)) is Need.SNAPSHOT
    assert scene.load == (1, 1)


def test_end_that_a_report_tells_first_is_the_only_one(scene: Scene) -> None:
    """The stream's own end comes a moment later: nothing is settled twice, and nothing lingers that the worker has told of."""
    placement = scene.core.route(prompt(unique(1, 640)), NOW)
    scene.core.accepted(placement, 0, NOW)
    scene.core.first_token(placement, NOW)
    scene.cache.report(NOW, ended=(placement.request_id,))
    scene.core.finished(placement, NOW, [placement.request.fingerprints])
    scene.core.failed(placement, NOW)
    assert (scene.load, len(scene.core.view.predictions)) == ((0, 0), 0)
    scene.core.check_invariants()


def test_what_lingers_ends_with_the_report_that_names_the_request(scene: Scene) -> None:
    """The stream ended first; the worker's events, and then the report, come a moment later. What it evicted meanwhile counts no more."""
    placement = scene.core.route(prompt(unique(1, 640)), NOW)
    scene.core.accepted(placement, 0, NOW)
    scene.core.finished(placement, NOW)
    scene.cache.report(NOW)
    assert believed(scene.core, placement.request) == {"w0": 10}
    scene.cache.store(placement.request.fingerprints[:4], NOW)
    scene.cache.report(NOW, ended=(placement.request_id,))
    assert (believed(scene.core, placement.request), len(scene.core.view.predictions)) == ({"w0": 4}, 0)


def test_flush_of_a_busy_worker_changes_the_epoch_and_not_the_reservations(scene: Scene) -> None:
    """What runs goes on and will be cached; what was cached is gone."""
    old, running = prompt(unique(1, 640)), scene.direct(2)
    scene.cache.store(old.fingerprints, NOW)
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(running.request_id,))
    before = scene.load
    scene.cache.tell(EventBatch([Cleared(Epoch(77), 0)]), NOW)
    assert (scene.load, running.reservation.state) == (before, ReservationState.ACCEPTED)
    assert (believed(scene.core, old), believed(scene.core, running.request)) == ({}, {"w0": 10})
    scene.core.check_invariants()


def test_next_turn_finds_the_last_one_before_the_worker_has_told(scene: Scene) -> None:
    """Between the end of an answer and the events of its blocks the conversation goes on where it was."""
    add_ready(scene.core, "w1")
    turn = unique(1, 640)
    placement = scene.core.route(prompt(turn), NOW)
    scene.core.accepted(placement, 0, NOW)
    answered = prompt([*turn, *range(5000, 5000 + BLOCK)])
    scene.core.finished(placement, NOW, [answered.fingerprints])
    assert believed(scene.core, answered) == {placement.endpoint: 11}
    following = scene.core.route(answered, NOW)
    assert following.endpoint == placement.endpoint


def test_a_request_that_ends_well_without_names_leaves_its_prompt(scene: Scene) -> None:
    placement = scene.core.route(prompt(unique(1, 640)), NOW)
    scene.core.accepted(placement, 0, NOW)
    scene.core.finished(placement, NOW)
    assert believed(scene.core, placement.request) == {"w0": 10}
    scene.core.tick(NOW + 1.0)
    assert believed(scene.core, placement.request) == {"w0": 10}
    scene.core.tick(NOW + 60.0)
    assert believed(scene.core, placement.request) == {}, "the worker has not told of it in a minute"


def test_others_load_weighs_as_much_as_own(scene: Scene) -> None:
    """Another router's requests, seen in the report, send a new prompt elsewhere."""
    add_ready(scene.core, "w1")
    scene.cache.report(NOW, running_requests=8, uncached_tokens=4000)
    taken = {scene.core.route(prompt(unique(seed, 300)), NOW).endpoint for seed in range(4)}
    assert taken == {"w1"}


def test_prompts_that_wait_cost_by_the_curve_that_their_worker_measures(scene: Scene) -> None:
    """1,000 tokens after 3,000 that are cached are dearer than 1,000 at a prompt's beginning, which is all that a count can mean."""
    curve = {"prefill_ms_per_token": 0.5, "prefill_ms_per_token2": 0.0001}
    scene.cache.report(
        NOW, running_requests=1, uncached_tokens=1000, uncached_squares=4000**2 - 3000**2, **curve
    )
    assert entry_of(scene.core, "w0").load.total.prefill_ms == pytest.approx(500 + 700)
    scene.cache.report(NOW, running_requests=1, uncached_tokens=1000, **curve)
    assert entry_of(scene.core, "w0").load.total.prefill_ms == pytest.approx(500), (
        "a worker that does not tell"
    )


def test_a_place_is_waited_for_as_long_as_answers_have_been_lately(scene: Scene) -> None:
    """Twice as long answers give places back half as often; what no worker has told is 64 tokens."""
    told = scene.core.registry.get(W0)
    assert told is not None
    assert told.facts is not None
    places, request = 128, prompt(unique(1, 64))
    scene.core.described(W0, replace(told.facts, max_running_requests=places), NOW)
    waits = []
    for answer_tokens in (0, 32, 64, 128):
        scene.cache.report(NOW, running_requests=places, answer_tokens=answer_tokens, decode_step_ms=40.0)
        ((_, terms),) = scene.core.explain(request, NOW).candidates
        waits.append(terms.wait_ms)
    assert waits == pytest.approx([40 * tokens / places for tokens in (64, 32, 64, 128)])


def test_silent_worker_is_believed_less_and_its_word_on_others_not_at_all(scene: Scene) -> None:
    scene.cache.report(NOW, running_requests=5, uncached_tokens=100)
    placement = scene.core.route(prompt(unique(1, 640)), NOW)
    scene.core.tick(NOW + 1.0)
    assert scene.load == (1, 6)
    scene.core.tick(NOW + 10.0)
    followed = scene.core.view.get(W0)
    assert followed is not None
    assert (followed.trust, scene.load, entry_of(scene.core, "w0").report) == (Trust.STALE, (1, 1), None)
    again = scene.core.route(placement.request, NOW + 10.0)
    assert again.predicted_cached_tokens == 320, "half of what is predicted"
    scene.cache.report(NOW + 10.0)
    assert followed.trust is Trust.EXACT


def test_reported_rates_and_room_enter_the_decision(scene: Scene) -> None:
    """A worker that measures itself ten times slower than the other gets nothing; a full pool is seen."""
    add_ready(scene.core, "w1")
    scene.cache.report(NOW, prefill_ms_per_token=5.0, prefill_ms_per_token2=0.002, decode_step_ms=300.0)
    scene.core.described(Endpoint("w1"), facts("w1"), NOW)
    columns, row = scene.core.fleet.columns, entry_of(scene.core, "w0").row
    assert columns.rates.linear[row] == 5.0
    assert columns.rates.quadratic[row] == 0.002
    other = ToldCache(scene.core, Endpoint("w1"), epoch=5)
    scene.core.view.ended(Endpoint("w1"), "test", NOW, is_void=True)
    other.open(NOW)
    other.report(NOW, prefill_ms_per_token=0.5, decode_step_ms=30.0)
    taken = {scene.core.route(prompt(unique(seed, 500)), NOW).endpoint for seed in range(5)}
    assert taken == {"w1"}


def test_draining_is_heard_in_a_report(scene: Scene) -> None:
    scene.cache.report(NOW, draining=True)
    assert scene.core.registry.ready == []
    scene.cache.report(NOW)
    assert len(scene.core.registry.ready) == 1


def test_errors_of_predictions_are_kept(scene: Scene) -> None:
    placement = scene.core.route(prompt(unique(1, 640)), NOW)
    scene.core.accepted(placement, 64, NOW + 0.1)
    scene.core.first_token(placement, NOW + 0.5)
    errors = entry_of(scene.core, "w0").errors
    assert (errors.cached_tokens.bias, errors.cached_tokens.size) == (64.0, 64.0)
    assert errors.first_token_ms.bias == pytest.approx(500.0 - placement.predicted_first_token_ms)


def test_delete_and_add_again_within_a_tick_is_a_new_worker(scene: Scene) -> None:
    """F23: load 0, view empty, nothing of the old stream heard."""
    scene.cache.store(prompt(unique(1, 640)).fingerprints, NOW)
    scene.direct(2)
    assert scene.core.remove_worker(W0)
    add_ready(scene.core, "w0", incarnation=1, tells=False)
    assert (scene.load, believed(scene.core, prompt(unique(1, 640)))) == ((0, 0), {})
    followed = scene.core.view.get(W0)
    assert followed is not None
    assert (followed.trust, len(scene.core.view.predictions)) == (Trust.BLIND, 0)
    scene.core.check_invariants()


def test_unknown_address_is_late_news(scene: Scene) -> None:
    nobody = Endpoint("nobody")
    core = scene.core
    assert core.stream_news(nobody, Incarnation(1), EventBatch([Cleared(Epoch(1), 0)]), NOW) is Need.SNAPSHOT
    assert core.fleet.opened(nobody, 0.1, NOW).resume_from is None
    core.view.ended(nobody, "late", NOW)
    core.view.tells_nothing(nobody, NOW)
    assert not core.remove_worker(nobody)


def test_explaining_shows_every_worker_and_changes_nothing() -> None:
    core = make_core(3)
    held = prompt(unique(1, 640))
    other = core.route(held, NOW)
    core.unreachable(Endpoint("w1" if other.endpoint != "w1" else "w2"), "connection refused")
    before = repr(core)
    told = core.explain(held, NOW, exclude={Endpoint("w0")} - {other.endpoint})
    assert repr(core) == before
    assert told.chosen == other.endpoint
    terms = {entry.endpoint: terms for entry, terms in told.candidates}
    assert terms[other.endpoint].device_tokens == 640
    assert any("connection refused" in why for _, why in told.excluded)
    assert {entry.endpoint for entry, _ in (*told.candidates, *told.excluded)} == {"w0", "w1", "w2"}


def test_explaining_says_why_a_worker_could_not_take_it() -> None:
    core = make_core(2)
    core.described(Endpoint("w0"), facts("w0", context_length=100), NOW)
    told = core.explain(prompt(unique(1, 640)), NOW, exclude={Endpoint("w1")})
    assert told.chosen is None
    assert {entry.endpoint: why for entry, why in told.excluded} == {
        "w0": "has not the room for 656 tokens of prompt and answer",
        "w1": "was excluded by the caller",
    }


def test_memory_reaches_a_plateau() -> None:
    """F34 (scaled down): unique prompts without end, all told of by their workers, stay within the index's bound, and predictions go."""
    core: RouterCore = make_core(0, max_tree_blocks=500)
    cache = ToldCache(core, add_ready(core, "w0", tells=False))
    cache.open(NOW)
    for seed in range(300):
        now = NOW + seed
        placement = core.route(prompt(unique(seed, 640)), now)
        core.accepted(placement, 0, now)
        core.finished(placement, now)
        cache.store(placement.request.fingerprints, now)
        assert cache.report(now) is Need.NOTHING, (
            "the view is proved by what was told, whatever there is room for"
        )
        core.tick(now)
        assert len(core.view.index) <= 600
        assert len(core.view.predictions) <= 5
    core.check_invariants()


def test_a_request_that_outlives_its_workers_removal_is_seen_when_the_worker_is_added_again(
    scene: Scene,
) -> None:
    name = scene.direct().request_id
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(name,))
    scene.core.remove_worker(W0)
    add_ready(scene.core, "w0", tells=False)
    scene.cache.open(NOW)
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(name,))
    assert scene.load == (0, 1)
    scene.cache.report(NOW, ended=(name,))
    assert scene.load == (0, 0)


def test_a_ticket_that_is_given_back_and_used_all_the_same_is_load(scene: Scene) -> None:
    placement = scene.direct()
    assert scene.core.withdraw(placement.request_id, NOW)
    scene.cache.report(NOW, running_requests=1, own_requests=1, accepted=(placement.request_id,))
    assert scene.load == (0, 1)


def test_another_life_has_the_room_that_is_not_known_yet_and_not_that_of_the_last(scene: Scene) -> None:
    row = entry_of(scene.core, "w0").row
    scene.cache.report(NOW, device_pool=PagePool(total_pages=100, free_pages=3, evictable_pages=0))
    assert scene.core.fleet.columns.free_tokens[row] == 3
    scene.core.described(W0, facts("w0", 2), NOW)
    assert scene.core.fleet.columns.free_tokens[row] == BOUNDLESS
    assert scene.core.fleet.columns.room_now[row] == BOUNDLESS


def test_report_of_a_worker_that_falls_silent_is_forgotten_although_its_view_was_blind() -> None:
    core = make_core(0)
    add_ready(core, "w0", tells=False)
    core.on_report(W0, WorkerReport(summary=CacheSummary(Epoch(1), 0, ()), running_requests=9), NOW)
    core.tick(NOW)
    assert entry_of(core, "w0").load.total.in_flight == 9
    core.tick(NOW + 10 * LEAST_SILENCE_S)
    assert entry_of(core, "w0").report is None
    assert entry_of(core, "w0").load.total.in_flight == 0
