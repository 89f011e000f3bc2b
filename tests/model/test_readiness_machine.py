"""Who is ready, kept up to date worker by worker, beside a look through the whole fleet that is taken anew after each thing that happens.

Six workers with three ids, so that ids are given up and taken over; half of what they tell is of another revision, or drains; they fail and
are well again, one by one and together, so that those who are put out are more than half, and fewer again.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from prefixmesh.ids import WorkerId
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_health import FAILURES_OUT, SUCCESSES_IN
from tests.support.simulated_fleet import BLOCK, EXPECTED, NOW, facts

ENDPOINTS = [Endpoint(f"127.0.0.1:{port}") for port in range(1, 7)]
endpoints = st.sampled_from(ENDPOINTS)
several = st.lists(endpoints, min_size=1, max_size=6, unique=True)
ids = st.sampled_from(["a", "b", "c"])


class ReadinessMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = RouterCore(
            EXPECTED, PolicyConfig(), block_size=BLOCK, max_tree_blocks=1_000, draw=lambda: 1
        )
        self.registry = self.core.registry
        self.news = self.registry.follow()
        self.told: dict[Endpoint, str] = {}

    @rule(which=several)
    def add(self, which: list[Endpoint]) -> None:
        for endpoint in which:
            self.core.add_worker(endpoint, NOW)

    @rule(which=several, worker_id=st.none() | ids)
    def come(self, which: list[Endpoint], worker_id: str | None) -> None:
        """All that a worker has to say until it is ready; under ids of their own, or all under one."""
        for endpoint in which:
            self.core.add_worker(endpoint, NOW)
            self.core.described(endpoint, facts(worker_id or endpoint), NOW)
            self.core.health_changed(endpoint, serving=True)

    @rule(which=several)
    def remove(self, which: list[Endpoint]) -> None:
        for endpoint in which[:2]:
            self.core.remove_worker(endpoint)
            self.told.pop(endpoint, None)

    @rule(
        endpoint=endpoints,
        worker_id=ids,
        life=st.integers(1, 2),
        is_ours=st.booleans(),
        context_length=st.sampled_from([100, 200, 300]),
        draining=st.booleans(),
    )
    def described(
        self,
        endpoint: Endpoint,
        worker_id: str,
        life: int,
        is_ours: bool,
        context_length: int,
        draining: bool,
    ) -> None:
        revision = EXPECTED.model_revision if is_ours else "other"
        told = facts(worker_id, life, revision=revision, context_length=context_length)
        self.core.described(endpoint, replace(told, draining=draining), NOW)

    @rule(which=several, serving=st.booleans())
    def health(self, which: list[Endpoint], serving: bool) -> None:
        for endpoint in which:
            self.core.health_changed(endpoint, serving=serving)

    @rule(which=several)
    def unreachable(self, which: list[Endpoint]) -> None:
        for endpoint in which:
            self.core.unreachable(endpoint, "gone")

    @rule(which=several, by_probe=st.booleans())
    def fail(self, which: list[Endpoint], by_probe: bool) -> None:
        for endpoint in which:
            for _ in range(FAILURES_OUT):
                if by_probe:
                    self.core.probe_ended(endpoint, "it did not answer", NOW)
                else:
                    self.core.request_failed(endpoint, "it has a bug", NOW)

    @rule(which=several)
    def recover(self, which: list[Endpoint]) -> None:
        for endpoint in which:
            for _ in range(SUCCESSES_IN):
                self.core.probe_ended(endpoint, "", NOW)

    @rule(endpoint=endpoints, leaving=st.booleans())
    def leave(self, endpoint: Endpoint, leaving: bool) -> None:
        self.core.fleet.set_leaving(endpoint, leaving=leaving)

    @rule(endpoint=endpoints, draining=st.booleans())
    def drain(self, endpoint: Endpoint, draining: bool) -> None:
        """As a report says it."""
        if self.registry.draining_changed(endpoint, draining=draining):
            self.core.fleet.tell_ready()

    @rule()
    def look(self) -> None:
        """A reader that looks now and then knows all that has changed in between, of those that are still known."""
        changed = self.news.take()
        assert [entry.number for entry in changed] == sorted({entry.number for entry in changed})
        for entry in changed:
            assert self.registry.get(entry.endpoint) is entry
            self.told[entry.endpoint] = entry.problem
        assert self.told == {entry.endpoint: entry.problem for entry in self.registry}
        assert self.news.take() == []

    @invariant()
    def all_is_as_if_looked_at_anew(self) -> None:
        registry = self.registry
        problems, sound, failing, spreads = review_of_all(list(registry))
        assert {entry.endpoint: entry.problem for entry in registry} == problems
        assert (registry.otherwise_ready, registry.failing) == (sound, len(failing))
        assert registry.spreads_over_all == spreads
        assert [entry for entry in registry if entry.ejected] == ([] if spreads else failing)
        ready = [entry for entry in registry if not problems[entry.endpoint]]
        assert registry.ready == ready
        contexts = [entry.facts.context_length for entry in ready if entry.facts is not None]
        assert registry.context_length == max(contexts, default=0)

    @invariant()
    def decisions_read_it(self) -> None:
        columns = self.core.fleet.columns
        assert set(columns.usable.nonzero()[0].tolist()) == {entry.row for entry in self.registry.ready}
        gives = {entry.row for entry in self.registry if entry.gives}
        assert set(columns.copies.gives.nonzero()[0].tolist()) == gives


def review_of_all(
    entries: list[WorkerEntry],
) -> tuple[dict[Endpoint, str], int, list[WorkerEntry], bool]:
    """Why each is not ready; how many are but for failing, who of them fails, and whether those are too many to be put out."""
    owners: dict[WorkerId, Endpoint] = {}
    problems = {entry.endpoint: entry.unreachable or problem_of(entry, owners) for entry in entries}
    sound = [entry for entry in entries if not problems[entry.endpoint]]
    failing = [entry for entry in sound if entry.health.is_failing]
    spreads = 2 * len(failing) > len(sound)
    for entry in [] if spreads else failing:
        problems[entry.endpoint] = (
            f"was put out: {entry.health.why}; it is back once 2 probes in a row are good"
        )
    return problems, len(sound), failing, spreads


def problem_of(entry: WorkerEntry, owners: dict[WorkerId, Endpoint]) -> str:
    told = entry.facts
    assert told is not None, "who can be reached has answered"
    owner = owners.setdefault(told.worker_id, entry.endpoint)
    if owner != entry.endpoint:
        return f"has the worker id {told.worker_id!r} that {owner} has already; give each worker its own"
    if problem := EXPECTED.problem_of(told):
        return problem
    if entry.draining:
        return "is draining: it finishes what it has and takes nothing new"
    if entry.leaving:
        return "is leaving: it hands over what it holds, and gets nothing new"
    if entry.serving is None:
        return "has not said yet whether it is serving"
    return "" if entry.serving else "says that it is not serving"


def run(examples: int, steps: int, **more: Any) -> None:
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
    run_state_machine_as_test(ReadinessMachine, settings=how)


def test_who_is_ready_is_what_a_look_through_the_whole_fleet_would_find() -> None:
    run(examples=25, steps=20)


@pytest.mark.deep
@pytest.mark.slow
def test_who_is_ready_is_what_a_look_through_the_whole_fleet_would_find_in_long_runs() -> None:
    run(examples=500, steps=60)
