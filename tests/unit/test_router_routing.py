"""The router's core over simulated workers: balance, affinity, predictions, beliefs and their correction."""

import random
from collections import Counter

import msgspec
import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import Placement
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_identity import Rates
from tests.support.simulated_fleet import (
    BLOCK,
    NOW,
    SimulatedFleet,
    add_ready,
    believed,
    facts,
    make_core,
    prompt,
    unique,
)

W0, W1 = Endpoint("w0"), Endpoint("w1")


def in_flight(core: RouterCore, endpoint: Endpoint) -> int:
    entry = core.registry.get(endpoint)
    assert entry is not None
    return entry.load.in_flight


def run_through(core: RouterCore, placement: Placement, cached: int = 0) -> None:
    core.accepted(placement, cached, NOW)
    core.first_token(placement, NOW)
    core.finished(placement, NOW)


def test_unloaded_worker_gets_new_prompts_whatever_it_holds() -> None:
    """F1: A empty with load 50, B with a big tree and load 0; unique prompts → 95 % of those sent before the loads meet go to B."""
    core = make_core(1)
    for seed in range(50):
        core.route(prompt(unique(seed, 300)), NOW)
    add_ready(core, "w1")
    core.unreachable(W0, "not now")
    for seed in range(1000, 1040):
        run_through(core, core.route(prompt(unique(seed, 3000)), NOW))
    core.described(W0, facts("w0"), NOW)
    core.health_changed(W0, serving=True)
    taken = Counter[str]()
    seed = 2000
    while in_flight(core, W1) < in_flight(core, W0):
        taken[core.route(prompt(unique(seed, 300)), NOW).endpoint] += 1
        seed += 1
    assert taken["w1"] >= 0.95 * taken.total()
    core.check_invariants()


def test_unique_prompts_spread_evenly() -> None:
    """F2 (in process): 200 unique prompts, 32 at once, 2 workers → 40 to 60 % each."""
    core = make_core(2)
    running: list[Placement] = []
    taken = Counter[str]()
    for seed in range(200):
        if len(running) == 32:
            run_through(core, running.pop(0))
        running.append(core.route(prompt(unique(seed, 300)), NOW))
        taken[running[-1].endpoint] += 1
    assert 80 <= taken["w0"] <= 120


def test_idle_equals_take_turns() -> None:
    """One request at a time, each with a new prompt: nobody's cache takes all the eviction."""
    core = make_core(4)
    taken = Counter[str]()
    for seed in range(40):
        placement = core.route(prompt(unique(seed, 300)), NOW)
        taken[placement.endpoint] += 1
        run_through(core, placement)
    assert set(taken.values()) == {10}


@pytest.mark.parametrize("rates", [Rates(0.0, 0.0), Rates(800.0, 40.0), Rates(20_000.0, 8.0)])
@pytest.mark.parametrize("prefix_tokens", [4000, 4096])
@pytest.mark.parametrize("max_tokens", [1, 16, None])
def test_burst_with_one_new_prefix_is_neither_scattered_nor_piled_up(
    rates: Rates, prefix_tokens: int, max_tokens: int | None
) -> None:
    """F6: 32 at once with one new 4k prefix and tails of 200, 4 empty workers → computed on at most 2, nobody gets over 60 %."""
    core = make_core(0)
    for index in range(4):
        add_ready(core, f"w{index}", rates=rates)
    prefix = list(range(prefix_tokens))
    taken = Counter(
        core.route(prompt([*prefix, *unique(100 + i, 200)], max_tokens), NOW).endpoint for i in range(32)
    )
    assert len(taken) <= 2
    assert max(taken.values()) <= 0.6 * 32


def test_true_prefix_decides() -> None:
    """F7: one worker holds P, another Q; Q+P → the second worker, with Q matched."""
    core = make_core(2)
    p, q = unique(1, 640), unique(2, 640)
    first = core.route(prompt(p), NOW)
    run_through(core, first)
    second = core.route(prompt(q), NOW, exclude={first.endpoint})
    run_through(core, second)
    third = core.route(prompt(q + p), NOW)
    assert third.endpoint == second.endpoint
    assert third.decision.terms.device_tokens == 640


def test_popular_prefix_is_balanced_and_stays_cached() -> None:
    """F9: 80 % share one prefix, 4 busy workers → max/mean load at most 1.5, hit rate at least 90 % of pure affinity's."""
    rng = random.Random(1)
    fleet = SimulatedFleet(make_core(4), {f"w{i}": 2000.0 for i in range(4)})
    popular, now, possible = unique(1, 1024), 0.0, 0
    for number in range(600):
        while fleet.in_flight >= 32:
            now = fleet.advance_to_next()
        shared = rng.random() < 0.8
        possible += 1024 if shared and number else 0
        own = unique(1000 + number, 200 if shared else 1024)
        fleet.arrive(prompt(popular + own if shared else own), now)
    fleet.advance(now + 1e6)
    loads = fleet.in_flight_seconds
    assert max(loads.values()) <= 1.5 * sum(loads.values()) / 4
    assert fleet.cached_tokens >= 0.9 * possible
    assert fleet.in_flight == 0
    fleet.core.check_invariants()


def test_slow_worker_gets_less_than_its_share() -> None:
    """F10: one of four workers ten times slower → under a third of a fair share, once that is measured."""
    rng = random.Random(2)
    core = make_core(0)
    speeds = {f"w{i}": 200.0 if i == 0 else 2000.0 for i in range(4)}
    for name, speed in speeds.items():
        add_ready(core, name, rates=Rates(speed, 30.0))
    fleet = SimulatedFleet(core, speeds)
    now = 0.0
    for number in range(300):
        now += rng.expovariate(6.0)
        fleet.arrive(prompt(unique(number, 500)), now)
    assert fleet.routed["w0"] < 300 / 4 / 3


def test_remove_and_add_again_never_goes_negative() -> None:
    """F14: start A on E; remove E; add E again; start B; A ends, B ends → 1, then 0."""
    core = make_core(1)
    a = core.route(prompt(unique(1, 100)), NOW)
    core.accepted(a, 0, NOW)
    core.remove_worker(W0)
    add_ready(core, "w0")
    b = core.route(prompt(unique(2, 100)), NOW)
    core.accepted(b, 0, NOW)
    core.finished(a, NOW)
    assert in_flight(core, W0) == 1
    core.failed(b, NOW)
    assert in_flight(core, W0) == 0
    assert believed(core, a.request) == {}, "the new life holds nothing of the old one's"
    core.check_invariants()


def test_restart_under_the_same_address_empties_view_and_load() -> None:
    """F23: a new incarnation holds nothing and has no load, and what ends late belongs to the old one."""
    core = make_core(1)
    done, running = core.route(prompt(unique(1, 640)), NOW), core.route(prompt(unique(2, 640)), NOW)
    run_through(core, done)
    core.accepted(running, 0, NOW)
    assert core.described(W0, facts("w0", incarnation=2), NOW) is True
    assert (in_flight(core, W0), believed(core, done.request), believed(core, running.request)) == (0, {}, {})
    core.finished(running, NOW)
    assert (in_flight(core, W0), believed(core, done.request), believed(core, running.request)) == (0, {}, {})
    assert core.described(W0, facts("w0", incarnation=2), NOW) is False


def test_wrong_belief_is_corrected_by_what_the_worker_found() -> None:
    """Of a cache that tells nothing: one that evicted a prefix is not credited with what continued it; what it now computes is believed
    anew."""
    core = make_core(0)
    add_ready(core, "w0", tells=False)
    core.view.tells_nothing(W0, NOW)
    shared = unique(1, 640)
    run_through(core, core.route(prompt(shared + unique(5, 640)), NOW))
    run_through(core, core.route(prompt(shared + unique(6, 640)), NOW), cached=640)
    again = core.route(prompt(shared + unique(5, 640)), NOW)
    assert again.decision.terms.device_tokens == 1280
    assert again.predicted_cached_tokens == 640, "half of what is only believed"
    core.accepted(again, 64, NOW)
    assert believed(core, prompt(shared + unique(6, 640))) == {W0: 10}
    assert believed(core, again.request) == {W0: 20}
    core.check_invariants()


def test_fully_cached_prompt_is_no_wrong_belief() -> None:
    """The last token is always computed; that is expected and drops nothing that continues the prompt."""
    core = make_core(0)
    add_ready(core, "w0", tells=False)
    core.view.tells_nothing(W0, NOW)
    start = unique(1, 2 * BLOCK)
    run_through(core, core.route(prompt(start + unique(2, 640)), NOW))
    again = core.route(prompt(start), NOW)
    core.accepted(again, 2 * BLOCK - 1, NOW)
    assert believed(core, prompt(start + unique(2, 640))) == {W0: 12}


def test_refused_request_leaves_no_belief() -> None:
    """What was never admitted was never computed: the prediction goes with its reservation."""
    core = make_core(1)
    held = unique(1, 640)
    run_through(core, core.route(prompt(held), NOW))
    refused = core.route(prompt(held + unique(2, 640)), NOW)
    core.failed(refused, NOW)
    assert believed(core, refused.request) == {W0: 10}
    core.check_invariants()


def test_refused_request_takes_nothing_from_others_under_way() -> None:
    """The first of a burst fails before its admission: the rest still compute the prefix, and are believed to."""
    core = make_core(2)
    prefix = unique(1, 640)
    first = core.route(prompt(prefix + unique(2, 200)), NOW)
    second = core.route(prompt(prefix + unique(3, 200)), NOW)
    assert second.endpoint == first.endpoint
    core.failed(first, NOW)
    third = core.route(prompt(prefix + unique(4, 200)), NOW)
    assert (third.endpoint, third.decision.terms.device_tokens) == (first.endpoint, 640)


def test_cancel_after_admission_keeps_the_belief() -> None:
    """A request that was cancelled while decoding has left its prompt in the cache."""
    core = make_core(1)
    placement = core.route(prompt(unique(1, 640)), NOW)
    core.accepted(placement, 0, NOW)
    core.failed(placement, NOW)
    assert believed(core, placement.request) == {W0: 10}


def test_worker_without_a_cache_is_credited_with_nothing() -> None:
    """With caching off, requests are spread by load alone."""
    core = make_core(0)
    for name in ("w0", "w1"):
        endpoint = add_ready(core, name)
        core.described(endpoint, facts(name, match_unit=0), NOW)
    taken = Counter(core.route(prompt(unique(1, 2000)), NOW).endpoint for _ in range(20))
    assert taken == {"w0": 10, "w1": 10}


def test_request_goes_only_where_it_fits() -> None:
    """A worker whose context is too short for prompt and answer is no candidate."""
    core = make_core(2)
    core.described(W0, facts("w0", context_length=1000), NOW)
    assert {core.route(prompt(unique(i, 990), max_tokens=16), NOW).endpoint for i in range(6)} == {"w1"}
    with pytest.raises(UnavailableError, match="context long enough"):
        core.route(prompt(unique(1, 990), max_tokens=16), NOW, exclude={W1})


def test_a_caller_that_has_excluded_everybody_is_told_so() -> None:
    """And not that no worker is known, or that its prompt is too long."""
    core = make_core(2)
    with pytest.raises(UnavailableError, match="that the caller has not excluded"):
        core.route(prompt(unique(1, 100)), NOW, exclude={W0, W1})
    core.described(W0, facts("w0", adapters={"law": "digest"}), NOW)
    with_adapter = msgspec.structs.replace(prompt(unique(1, 100)), adapter="law", adapter_digest="digest")
    with pytest.raises(UnavailableError, match="has the adapter 'law' and that the caller has not excluded"):
        core.route(with_adapter, NOW, exclude={W0})


def test_nobody_ready_says_why() -> None:
    """UNAVAILABLE names the workers' problems."""
    core = make_core(1)
    core.unreachable(W0, "connection refused")
    with pytest.raises(UnavailableError, match=r"w0 cannot be reached: connection refused"):
        core.route(prompt(unique(1, 100)), NOW)


def test_totals_count_what_the_worker_found() -> None:
    """F71: cached tokens never exceed prompt tokens; the totals say what was routed."""
    core = make_core(1, config=PolicyConfig(policy="round_robin"))
    for cached in (0, 99):
        run_through(core, core.route(prompt(unique(1, 100)), NOW), cached)
    entry = core.registry.get(W0)
    assert entry is not None
    assert (entry.totals.routed, entry.totals.prompt_tokens, entry.totals.cached_tokens) == (2, 200, 99)


def test_a_worker_that_joins_later_is_fed_slowly_and_those_of_the_beginning_are_not() -> None:
    """All workers are new to a new router; one that comes a minute later is warmed up first, and one that restarts, too."""
    core = make_core(2)
    assert len(core._newcomers) == 0, "nobody is held back, and nobody looked at for it"
    later = NOW + 60.0
    core.add_worker(Endpoint("w2"), later)
    core.described(Endpoint("w2"), facts("w2"), later)
    core.health_changed(Endpoint("w2"), serving=True)
    taken = Counter[str](core.route(prompt(unique(seed, 300)), later).endpoint for seed in range(30))
    assert taken["w2"] <= 2
    assert min(taken["w0"], taken["w1"]) >= 10
    core.described(W1, facts("w1", incarnation=9), later)
    again = Counter[str](core.route(prompt(unique(100 + seed, 300)), later).endpoint for seed in range(10))
    assert again["w0"] >= 8


def test_thousand_random_lives_leave_nothing_behind() -> None:
    """F12 (core): requests that end in every way at every point leave all loads at exactly zero."""
    rng = random.Random(3)
    core = make_core(3, max_tree_blocks=200)
    running: list[Placement] = []
    for step in range(1000):
        running.append(core.route(prompt(unique(rng.randrange(9), rng.randrange(1, 600))), NOW))
        if rng.random() < 0.5:
            core.accepted(rng.choice(running), rng.choice([0, 64]), NOW)
        if rng.random() < 0.5:
            core.first_token(rng.choice(running), NOW)
        if rng.random() < 0.02:
            core.described(W0, facts("w0", incarnation=step), NOW)
        if len(running) > 10 or rng.random() < 0.5:
            placement = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.5:
                core.failed(placement, NOW)
            else:
                core.finished(placement, NOW)
        if step % 50 == 0:
            core.check_invariants()
    for placement in running:
        core.failed(placement, NOW)
    assert [(entry.load.in_flight, entry.load.work_ms) for entry in core.registry] == [(0, 0.0)] * 3
    core.check_invariants()
    assert repr(core).startswith("RouterCore(0 placed, WorkerRegistry(3/3 ready")
