"""The adapter table against a naive picture of slots and requests, in any order of commands, ends and failing reads.

The picture is a device that does what it is told: weights are where they were read to, and are gone when they were dropped. At every
moment each running request's slot must hold its own content, and at the end, when all reads are done and all who run have ended,
nobody may be left waiting.
"""

from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixmesh.errors import BudgetError, NotFoundError
from prefixmesh.worker import adapters
from prefixmesh.worker.adapter_records import Drop, Grant, Load, Refusal, Unloaded
from prefixmesh.worker.adapters import AdapterTable

NAMES: Final = st.sampled_from(["one", "two", "three", "four"])
CONTENTS: Final = st.sampled_from(["a", "b", "c", "d", "e"])
SIZES: Final = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 9}
"""``e`` is larger than any budget."""


class AdapterTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0
        self.loads: dict[str, Load] = {}
        self.device: dict[int, str] = {}
        self.running: dict[str, tuple[str, int]] = {}
        self.waiting: dict[str, str] = {}
        self.unloads: dict[int, set[str]] = {}

    @initialize(max_resident=st.integers(1, 3), budget=st.integers(3, 6))
    def begin(self, max_resident: int, budget: int) -> None:
        self.max_resident = max_resident
        self.budget = budget
        self.table = AdapterTable(max_resident=max_resident, budget_bytes=budget, max_waiting=6)

    @rule(name=NAMES, digest=CONTENTS, pinned=st.booleans())
    def learn(self, name: str, digest: str, pinned: bool) -> None:
        before = self.table.infos()
        try:
            self.table.learn(
                name, digest=digest, path=digest, rank=1, size_bytes=SIZES[digest], pinned=pinned
            )
        except BudgetError:
            assert self.table.infos() == before
        else:
            assert self.table.info(name).digest == digest
            assert self.table.knows(digest)
        self.perform()

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        question = self.new_id()
        known = {info.name: info.digest for info in self.table.infos()}
        try:
            self.table.forget(name, question)
        except NotFoundError:
            assert name not in known
        else:
            digest = known[name]
            self.unloads[question] = {x for x, (mine, _) in self.running.items() if mine == digest}
            self.unloads[question] |= {x for x, mine in self.waiting.items() if mine == digest}
        self.perform()

    @rule(digest=CONTENTS)
    def acquire(self, digest: str) -> None:
        request_id = f"r{self.new_id()}"
        known = self.table.knows(digest)
        self.waiting[request_id] = digest
        self.table.acquire(digest, request_id)
        self.perform()
        if not known:
            assert request_id not in self.waiting
            assert request_id not in self.running

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted([*self.running, *self.waiting]))))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), works=st.booleans())
    def read(self, data: st.DataObject, works: bool) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.loads))), works=works)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_invariants()
        for digest, slot in self.running.values():
            assert self.device[slot] == digest, "a request runs with the weights of another adapter"
        assert len(self.device) + len(self.loads) <= self.max_resident
        held = [*self.device.values(), *self.loads]
        assert len(set(held)) == len(held)
        assert sum(SIZES[digest] for digest in held) <= self.budget
        slots = [slot for _, slot in self.running.values()]
        assert self.table.slots_of([*self.running, "base"]) == ([*slots, -1] if slots else [])
        for info in self.table.infos():
            assert info.resident == (info.digest in self.device.values())

    def teardown(self) -> None:
        """Whoever waits is answered as soon as reads are done and those who run have ended."""
        if not hasattr(self, "table"):
            return
        for _ in range(1000):
            if self.loads:
                self.finish(next(iter(self.loads)), works=True)
            elif self.running:
                self.end(next(iter(self.running)))
            else:
                break
            self.holds()
        assert not self.waiting
        assert not self.unloads

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def end(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self.forget_ended(request_id)
        self.table.release(request_id)
        self.perform()

    def finish(self, digest: str, *, works: bool) -> None:
        load = self.loads.pop(digest)
        if works:
            self.device[load.slot] = digest
            self.table.loaded(digest)
        else:
            self.table.load_failed(digest, "broken")
        self.perform()

    def forget_ended(self, request_id: str) -> None:
        for pending in self.unloads.values():
            pending.discard(request_id)

    def perform(self) -> None:
        for action in self.table.take_actions():
            match action:
                case Grant(request_id=request_id, slot=slot):
                    self.running[request_id] = (self.waiting.pop(request_id), slot)
                case Refusal(request_id=request_id):
                    del self.waiting[request_id]
                    self.forget_ended(request_id)
                case Load(digest=digest):
                    assert digest not in self.loads
                    self.loads[digest] = action
                case Drop(slot=slot):
                    digest = self.device.pop(slot)
                    assert digest not in {mine for mine, _ in self.running.values()}
                case Unloaded(question=question):
                    assert not self.unloads.pop(question), "an unload was answered while its requests run"


def run_machine(examples: int, *, repeatable: bool) -> None:
    run_state_machine_as_test(
        AdapterTableMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=repeatable,
            report_multiple_bugs=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_calls_agrees_with_the_naive_picture() -> None:
    """The same few examples each time."""
    run_machine(25, repeatable=True)


def test_any_order_agrees_where_nobody_may_be_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as somebody waits for a slot, another content is drained: the rare path made common."""
    monkeypatch.setattr(adapters, "MAX_PASSED_OVER", 0)
    run_machine(25, repeatable=True)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("bound", [0, 2, 32])
def test_many_orders_of_calls_agree_with_the_naive_picture(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """Many, and others each time."""
    monkeypatch.setattr(adapters, "MAX_PASSED_OVER", bound)
    run_machine(2000, repeatable=False)
