"""When a worker is put out and when it is back, and that no row of events puts out more than half."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.routing import GATHER_S, RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_health import (
    FAILURES_OUT,
    FIRST_PAUSE_S,
    FORGIVEN_S,
    LONGEST_PAUSE_S,
    LONGEST_STAY_S,
    PROBE_INTERVAL_S,
    SUCCESSES_IN,
    WorkerHealth,
)
from tests.support.simulated_fleet import EXPECTED, NOW, facts, make_core, prompt, unique

ENDPOINTS = [Endpoint(f"127.0.0.1:{port}") for port in range(1, 6)]


def fleet(workers: int) -> WorkerRegistry:
    """So many ready workers."""
    registry = WorkerRegistry(EXPECTED)
    for endpoint in ENDPOINTS[:workers]:
        registry.add(endpoint)
        registry.described(endpoint, facts(endpoint))
        registry.health_changed(endpoint, serving=True)
    return registry


def entry_of(registry: WorkerRegistry, endpoint: Endpoint) -> WorkerEntry:
    entry = registry.get(endpoint)
    assert entry is not None
    return entry


def ready(registry: WorkerRegistry) -> list[Endpoint]:
    return [entry.endpoint for entry in registry.ready]


def by_probe(registry: WorkerRegistry, endpoint: Endpoint) -> None:
    registry.probe_ended(endpoint, "it did not answer", NOW)


def by_request(registry: WorkerRegistry, endpoint: Endpoint) -> None:
    registry.request_failed(endpoint, "it has a bug", NOW)


def put_out(registry: WorkerRegistry, *endpoints: Endpoint) -> None:
    for endpoint in endpoints:
        for _ in range(FAILURES_OUT):
            by_probe(registry, endpoint)


@pytest.mark.parametrize("fail", [by_probe, by_request])
def test_three_failures_in_a_row_put_a_worker_out_and_say_why(
    fail: Callable[[WorkerRegistry, Endpoint], None],
) -> None:
    registry = fleet(2)
    for failures in range(1, FAILURES_OUT + 1):
        assert ready(registry) == ENDPOINTS[:2]
        fail(registry, ENDPOINTS[0])
        assert entry_of(registry, ENDPOINTS[0]).health.failures == failures
    assert ready(registry) == [ENDPOINTS[1]]
    out = entry_of(registry, ENDPOINTS[0])
    assert out.ejected
    assert "was put out" in out.problem
    assert ("did not answer" if fail is by_probe else "it has a bug") in out.problem


def test_a_success_in_between_begins_the_row_anew() -> None:
    registry = fleet(2)
    for _ in range(3 * FAILURES_OUT):
        for _ in range(FAILURES_OUT - 1):
            by_probe(registry, ENDPOINTS[0])
            by_request(registry, ENDPOINTS[0])
        registry.probe_ended(ENDPOINTS[0], "", NOW)
        registry.request_succeeded(ENDPOINTS[0])
    assert ready(registry) == ENDPOINTS[:2]


def test_good_probes_do_not_hide_requests_that_fail() -> None:
    """A front that answers probes before an engine that fails everything."""
    registry = fleet(2)
    for _ in range(FAILURES_OUT):
        registry.probe_ended(ENDPOINTS[0], "", NOW)
        by_request(registry, ENDPOINTS[0])
    assert ready(registry) == [ENDPOINTS[1]]


def test_two_good_probes_in_a_row_bring_a_worker_back() -> None:
    registry = fleet(2)
    put_out(registry, ENDPOINTS[0])
    assert not registry.probe_ended(ENDPOINTS[0], "", NOW)
    by_probe(registry, ENDPOINTS[0])
    registry.request_succeeded(ENDPOINTS[0])
    for good in range(1, SUCCESSES_IN + 1):
        assert ready(registry) == [ENDPOINTS[1]]
        assert registry.probe_ended(ENDPOINTS[0], "", NOW) is (good == SUCCESSES_IN)
    assert ready(registry) == ENDPOINTS[:2]
    assert entry_of(registry, ENDPOINTS[0]).health.failures == 0


def test_where_more_than_half_fail_requests_go_to_all_until_fewer_do() -> None:
    registry = fleet(4)
    put_out(registry, *ENDPOINTS[:2])
    assert (ready(registry), registry.spreads_over_all) == (ENDPOINTS[2:4], False)
    put_out(registry, ENDPOINTS[2])
    assert (ready(registry), registry.spreads_over_all) == (ENDPOINTS[:4], True)
    assert not any(entry.ejected for entry in registry)
    for _ in range(SUCCESSES_IN):
        registry.probe_ended(ENDPOINTS[0], "", NOW)
    assert (ready(registry), registry.spreads_over_all) == ([ENDPOINTS[0], ENDPOINTS[3]], False)


def test_the_only_worker_is_never_put_out() -> None:
    registry = fleet(1)
    put_out(registry, ENDPOINTS[0])
    assert ready(registry) == ENDPOINTS[:1]


def test_half_is_counted_of_those_that_could_be_sent_something() -> None:
    """A worker that is gone, or drains, is no reason to put out one more."""
    registry = fleet(4)
    put_out(registry, *ENDPOINTS[:2])
    registry.unreachable(ENDPOINTS[3], "gone")
    assert ready(registry) == ENDPOINTS[:3]
    registry.described(ENDPOINTS[3], facts(ENDPOINTS[3]))
    registry.health_changed(ENDPOINTS[3], serving=True)
    assert ready(registry) == ENDPOINTS[2:4]


def test_one_connection_that_breaks_counts_once_whatever_was_on_it() -> None:
    registry = fleet(2)
    for order in (by_request, None), (None, by_request):
        for tell in order:
            if tell is None:
                registry.unreachable(ENDPOINTS[0], "connection reset")
            else:
                tell(registry, ENDPOINTS[0])
        for _ in range(50):
            by_request(registry, ENDPOINTS[0])
        registry.described(ENDPOINTS[0], facts(ENDPOINTS[0]))
        registry.health_changed(ENDPOINTS[0], serving=True)
        assert ready(registry) == ENDPOINTS[:2]
    assert entry_of(registry, ENDPOINTS[0]).health.failures == 2
    registry.unreachable(ENDPOINTS[0], "connection reset")
    by_request(registry, ENDPOINTS[0])
    registry.described(ENDPOINTS[0], facts(ENDPOINTS[0]))
    registry.health_changed(ENDPOINTS[0], serving=True)
    assert ready(registry) == [ENDPOINTS[1]], "one that breaks every request's connection is failing"


def test_another_life_begins_well() -> None:
    registry = fleet(2)
    put_out(registry, ENDPOINTS[0])
    registry.described(ENDPOINTS[0], facts(ENDPOINTS[0]))
    assert ready(registry) == [ENDPOINTS[1]], "the same life said who it is"
    registry.described(ENDPOINTS[0], facts(ENDPOINTS[0], 2))
    assert ready(registry) == ENDPOINTS[:2]


def as_another_life(core: RouterCore, endpoint: Endpoint) -> None:
    core.described(endpoint, facts(endpoint, 2), NOW)


def on_another_connection(core: RouterCore, endpoint: Endpoint) -> None:
    core.unreachable(endpoint, "connection reset")
    core.described(endpoint, facts(endpoint), NOW)


def well_again(core: RouterCore, endpoint: Endpoint) -> None:
    for _ in range(FAILURES_OUT):
        core.probe_ended(endpoint, "it did not answer", NOW)
    for _ in range(SUCCESSES_IN):
        core.probe_ended(endpoint, "", NOW)


@pytest.mark.parametrize("come_back", [as_another_life, on_another_connection, well_again])
def test_what_was_placed_before_a_worker_came_back_does_not_tell_of_now(
    come_back: Callable[[RouterCore, Endpoint], None],
) -> None:
    """A caller that reads slowly comes late to the end of a stream that broke long ago."""
    core = make_core(1)
    placed = core.route(prompt(unique(1, 300)), NOW)
    core.described(placed.endpoint, facts(placed.endpoint), NOW)
    core.probe_ended(placed.endpoint, "it did not answer", NOW)
    core.probe_ended(placed.endpoint, "", NOW)
    told = [placed.tells_of_now]
    come_back(core, placed.endpoint)
    told.append(placed.tells_of_now)
    assert told == [True, False]
    core.health_changed(placed.endpoint, serving=True)
    assert core.route(prompt(unique(1, 300)), NOW).tells_of_now


def test_a_break_that_its_requests_tell_of_first_is_one_of_now() -> None:
    core = make_core(1)
    placed = core.route(prompt(unique(1, 300)), NOW)
    core.unreachable(placed.endpoint, "connection reset")
    assert placed.tells_of_now


def test_who_comes_back_is_fed_slowly() -> None:
    core = RouterCore(
        EXPECTED, PolicyConfig(slow_start_s=10.0), block_size=64, max_tree_blocks=1_000, draw=lambda: 1
    )
    late = NOW + 2 * GATHER_S
    for endpoint in ENDPOINTS[:2]:
        core.add_worker(endpoint, NOW)
        core.described(endpoint, facts(endpoint), NOW)
        core.health_changed(endpoint, serving=True)
    for _ in range(FAILURES_OUT):
        core.probe_ended(ENDPOINTS[0], "it did not answer", late)
    assert core.fleet.columns.usable.tolist() == [False, True]
    assert len(core._newcomers) == 0
    for _ in range(SUCCESSES_IN):
        core.probe_ended(ENDPOINTS[0], "", late)
    assert core.fleet.columns.usable.tolist() == [True, True]
    assert len(core._newcomers) == 1


def test_pauses_between_probes_double_and_half_of_each_is_chance() -> None:
    health = WorkerHealth()
    assert health.pause_s(0.5) == PROBE_INTERVAL_S
    for _ in range(FAILURES_OUT):
        health.probe_ended("it did not answer", NOW)
    pauses = []
    for _ in range(2_000):
        assert health.pause_s(0.0) == health.pause_s(1.0) / 2
        pauses.append(health.pause_s(1.0))
        health.probe_ended("it did not answer", NOW)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert set(pauses[3:]) == {LONGEST_PAUSE_S}
    health.probe_ended("", NOW)
    assert health.pause_s(1.0) == PROBE_INTERVAL_S


def test_who_fails_again_soon_stays_out_longer_and_who_was_well_for_long_does_not() -> None:
    health, now, pauses = WorkerHealth(), NOW, []
    for _ in range(8):
        for _ in range(FAILURES_OUT):
            health.request_failed("it has a bug", now)
        pauses.append(health.pause_s(1.0))
        for _ in range(SUCCESSES_IN):
            health.probe_ended("", now)
        now += FORGIVEN_S / 2
    assert pauses == [1, 2, 4, 8, 16, LONGEST_STAY_S, LONGEST_STAY_S, LONGEST_STAY_S]
    now += FORGIVEN_S
    for _ in range(FAILURES_OUT):
        health.request_failed("it has a bug", now)
    assert health.pause_s(1.0) == FIRST_PAUSE_S


EVENTS = ("probe failed", "probe good", "request failed", "request good", "gone", "back", "drains", "serves", "new life")  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(ENDPOINTS), st.sampled_from(EVENTS)), max_size=120))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_no_row_of_events_puts_out_more_than_half_or_leaves_out_who_is_well(
    events: list[tuple[Endpoint, str]],
) -> None:
    registry = fleet(5)
    lives = dict.fromkeys(ENDPOINTS, 1)
    for endpoint, event in events:
        match event:
            case "probe failed":
                by_probe(registry, endpoint)
            case "probe good":
                registry.probe_ended(endpoint, "", NOW)
            case "request failed":
                by_request(registry, endpoint)
            case "request good":
                registry.request_succeeded(endpoint)
            case "gone":
                registry.unreachable(endpoint, "reset")
            case "back":
                registry.described(endpoint, facts(endpoint, lives[endpoint]))
                registry.health_changed(endpoint, serving=True)
            case "drains" | "serves":
                registry.health_changed(endpoint, serving=event == "serves")
            case "new life":
                lives[endpoint] += 1
                registry.described(endpoint, facts(endpoint, lives[endpoint]))
        out = [entry for entry in registry if entry.ejected]
        others = [entry for entry in registry if entry.ready or entry.ejected]
        assert len(out) * 2 <= len(others)
        assert all(entry.health.is_failing and not entry.ready for entry in out)
        if not registry.spreads_over_all:
            assert not any(entry.health.is_failing for entry in registry.ready)


def test_worker_that_is_asked_for_nothing_for_ten_minutes_stays_ready() -> None:
    """F11: quiet is no failure; nobody is deregistered, whatever time passes."""
    core = RouterCore(EXPECTED, PolicyConfig(), block_size=64, max_tree_blocks=1_000, draw=lambda: 1)
    core.add_worker(ENDPOINTS[0], NOW)
    core.described(ENDPOINTS[0], facts("w0"), NOW)
    core.health_changed(ENDPOINTS[0], serving=True)
    for second in range(600):
        core.tick(NOW + second)
        core.probe_ended(ENDPOINTS[0], "", NOW + second)
    assert ready(core.registry) == ENDPOINTS[:1]
    assert len(core.registry) == 1
