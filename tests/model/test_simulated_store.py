"""The store that routers share is gone, slow, emptied, and back: requests go on, workers and pins stay as they were seen last, and nobody acts for
pins without the lease. F28 in simulated time, with the real mirror and the real lease.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from prefixmesh.errors import CancelledError, DeadlineError
from prefixmesh.router import state_lease
from prefixmesh.router.pins.acting_lease import LEASE, LEASE_S, RENEW_S, ActingLease
from prefixmesh.router.pins.records import PINS
from prefixmesh.router.state_mirror import StateMirror
from prefixmesh.router.state_store import Change
from prefixmesh.router.worker_roster import WORKERS
from prefixmesh.sim.fault_file import parse_script
from prefixmesh.sim.fault_plan import FaultPlan, read_plan
from prefixmesh.sim.fault_run import FaultRun, first_failing
from prefixmesh.sim.fault_state import FleetState
from prefixmesh.sim.simulated_router import RouterLife
from prefixmesh.sim.simulated_state import CALL_TIMEOUT_S, MOST_RETRY_S, SimulatedState
from prefixmesh.sim.simulated_store import SimulatedStore
from prefixmesh.worker.prefix_messages import ListPins, PrefixAnswer

KNOWN_S = 2.0
"""By then every router has read everything, and one has the lease."""


def run_of(*faults: dict[str, Any], seed: int = 1, workers: int = 3, routers: int = 2) -> FaultRun:
    text = json.dumps({"workers": workers, "routers": routers, "faults": faults})
    return FaultRun(seed, plan=FaultPlan(written=parse_script(text, "test")))


def store_of(run: FaultRun) -> SimulatedStore:
    assert run.state is not None
    return run.state.store


def state_of(life: RouterLife | None) -> SimulatedState:
    assert life is not None
    assert life.state is not None
    return life.state


def holders(run: FaultRun) -> list[str]:
    return [one.name for one in run.routers if one.life is not None and state_of(one.life).lease.is_held]


def first_moment(run: FaultRun, holds: Callable[[], bool], within_s: float) -> float:
    """Seconds until something holds, looked at every tenth of a second."""
    began = run.sim.now
    while not holds():
        assert run.sim.now - began <= within_s
        run.sim.run_for(0.1)
    return run.sim.now - began


def test_store_that_is_gone_all_the_while_costs_no_request() -> None:
    run = run_of({"of": "store", "kind": "crash", "at_s": 0, "for_s": 30})
    report = run.run()
    assert report.problems == []
    ends = {"whole" if one.error is None else one.error.reason for one in run.callers.clients}
    assert ends <= {
        "whole",
        DeadlineError.reason,
        CancelledError.reason,
    }  # whose callers had little time, or left
    assert report.finished > 0.7 * report.requests


def test_router_that_begins_without_the_store_follows_whom_it_was_given_and_then_all() -> None:
    run = run_of(
        {"of": "store", "kind": "stall", "at_s": 2, "for_s": 10},
        {"of": "router-0", "kind": "crash", "at_s": 3, "for_s": 1},
    )
    run.sim.run_until(KNOWN_S)
    assert [len(router.life.links) for router in run.routers if router.life is not None] == [3, 3]
    run.sim.run_until(11.0)
    assert [len(router.life.links) for router in run.routers if router.life is not None] == [1, 3]
    run.sim.run_until(12.0 + CALL_TIMEOUT_S + MOST_RETRY_S)
    assert [len(router.life.links) for router in run.routers if router.life is not None] == [3, 3]


def test_lease_lapses_while_the_store_is_gone_and_one_router_has_it_soon_after() -> None:
    run = run_of({"of": "store", "kind": "stall", "at_s": 5, "for_s": 20})
    run.sim.run_until(5.0)
    assert len(holders(run)) == 1
    run.sim.run_until(5.0 + LEASE_S)
    assert holders(run) == []
    run.sim.run_until(25.0)
    assert holders(run) == []
    assert first_moment(run, lambda: len(holders(run)) == 1, 2 * RENEW_S + CALL_TIMEOUT_S) >= 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "cut_silently"])
def test_router_that_cannot_reach_the_store_leaves_the_lease_to_the_other(kind: str) -> None:
    first = run_of({"of": "store", "kind": "delay", "at_s": 0, "for_s": 0, "amount": 1})
    first.sim.run_until(KNOWN_S)
    (holder,) = holders(first)
    (other,) = {"router-0", "router-1"} - {holder}
    run = run_of({"of": [holder, "store"], "kind": kind, "at_s": 3, "for_s": 30})
    for _ in range(140):
        run.sim.run_for(0.1)
        assert len(holders(run)) <= 1
    assert holders(run) == [other]


@pytest.mark.slow
def test_pins_stay_on_workers_while_the_store_is_gone() -> None:
    run = run_of({"of": "store", "kind": "crash", "at_s": 14, "for_s": 30})
    run.sim.run_until(14.0)
    before = pins_of(run)
    assert sum(map(len, before.values())) >= 3
    run.sim.run_until(30.0)
    assert pins_of(run) == before


def pins_of(run: FaultRun) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for worker in run.workers.values():
        assert worker.life is not None
        (answer,) = worker.life.engine.core.handle(ListPins(question=0), run.sim.now)
        assert isinstance(answer, PrefixAnswer)
        found[worker.name] = {pin.pin_id for pin in answer.pins if not pin.missing_tokens}
    return found


@pytest.mark.parametrize("kind", ["flush", pytest.param("lose", marks=pytest.mark.slow)])
def test_store_that_was_emptied_gets_back_what_routers_know(kind: str) -> None:
    fault = {"of": "store", "kind": kind, "at_s": 10, **({} if kind == "flush" else {"for_s": 4})}
    run = run_of(fault)
    run.sim.run_until(9.9)
    before = {key: entry.value for key, entry in store_of(run).reading().entries.items() if key != LEASE}
    assert {key.split("/")[0] + "/" for key in before} == {WORKERS, PINS}
    run.sim.run_until(10.0)
    assert not store_of(run).reading().entries
    run.sim.run_until(14.0 + 5.0)  # subscribers are back within five seconds
    after = store_of(run).reading()
    assert {key: entry.value for key, entry in after.entries.items() if key != LEASE} == before
    for router in run.routers:
        assert state_of(router.life).mirror.identity == after.identity
        assert router.life is not None
        assert router.life.forgotten == []


def test_store_that_is_slow_is_a_store() -> None:
    run = run_of({"of": "store", "kind": "delay", "at_s": 3, "for_s": 60, "amount": 1000})
    for _ in range(140):
        run.sim.run_for(0.1)
        if run.sim.now > KNOWN_S:
            assert len(holders(run)) == 1


def plant_a_lease_that_never_lapses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had it acts for ever."""
    monkeypatch.setattr(ActingLease, "is_held", property(lambda lease: lease._held_until > 0.0))


def plant_a_lease_that_anybody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's is no reason."""
    monkeypatch.setattr(state_lease, "_is_others", lambda *_: False)


def plant_a_mirror_that_believes_an_emptied_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put back."""
    monkeypatch.setattr(StateMirror, "is_lost", lambda *_: False)


def plant_a_mirror_that_misses_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost on the way is never asked for."""

    def heard(mirror: StateMirror, version: int) -> bool:
        mirror.told = max(mirror.told, version)
        return True

    monkeypatch.setattr(StateMirror, "heard", heard)
    apply = SimulatedState._apply

    def forgetful(state: SimulatedState, change: Change) -> None:
        if change.key == LEASE:
            apply(state, change)

    monkeypatch.setattr(SimulatedState, "_apply", forgetful)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "shown_by"),
    [
        (plant_a_lease_that_never_lapses, "ordered something for pins"),
        (plant_a_lease_that_anybody_takes, "hold the lease|ordered something for pins"),
        (plant_a_mirror_that_believes_an_emptied_store, "is lost|forgot"),
        (plant_a_mirror_that_misses_writes, "believes that the store holds"),
    ],
)
def test_planted_bugs_of_the_state_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], shown_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = first_failing(range(60), plan=read_plan("store"))
    assert report is not None, "not found"
    assert any(part in problem for problem in report.problems for part in shown_by.split("|")), str(report)


@pytest.mark.slow
def test_many_seeds_of_a_store_that_is_hit_lose_nothing() -> None:
    report = first_failing(range(12), plan=read_plan("store,crashes,network"))
    assert report is None, str(report)


def test_what_a_router_believed_before_is_asked_of_the_store_only_where_somebody_knew_it() -> None:
    """Both routers died while it was emptied: what it held is gone, as a Redis says that keeps nothing."""
    run = run_of(
        {"of": "router-0", "kind": "crash", "at_s": 2, "for_s": 3},
        {"of": "router-1", "kind": "crash", "at_s": 2, "for_s": 3},
        {"of": "store", "kind": "flush", "at_s": 3},
    )
    run.sim.run_until(30.0)
    assert isinstance(run.state, FleetState)
    assert not [key for key in store_of(run).reading().entries if key.startswith(WORKERS)]
    assert [one for one in run.state.broken(run.routers) if "lost" in one] == []
