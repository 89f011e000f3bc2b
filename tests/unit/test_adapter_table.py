"""Names, contents and slots of adapters: who is resident, who leaves, who waits, and for how long at most."""

import pytest

from prefixmesh.errors import BudgetError, NotFoundError
from prefixmesh.worker import adapters
from prefixmesh.worker.adapter_records import Action, Drop, Grant, Load, Refusal, Unloaded
from prefixmesh.worker.adapters import MAX_PASSED_OVER, AdapterTable


def make_table(*names: str, max_resident: int = 2, budget: int = 100, max_waiting: int = 100) -> AdapterTable:
    """A table that knows these names, each of the content of its name and of 10 bytes; as many resident as there is room for."""
    table = AdapterTable(max_resident=max_resident, budget_bytes=budget, max_waiting=max_waiting)
    for name in names:
        learn(table, name)
    settle(table)
    return table


def learn(table: AdapterTable, name: str, content: str = "", *, size: int = 10, pinned: bool = False) -> None:
    digest = content or name
    table.learn(name, digest=digest, path=digest, rank=8, size_bytes=size, pinned=pinned)


def settle(table: AdapterTable) -> list[Action]:
    """Do every read at once; all that happened."""
    done: list[Action] = []
    while actions := table.take_actions():
        done += actions
        for action in actions:
            if isinstance(action, Load):
                table.loaded(action.digest)
        table.check_invariants()
    return done


def resident(table: AdapterTable) -> list[str]:
    return [info.name for info in table.infos() if info.resident]


def test_the_least_recently_used_leaves() -> None:
    table = make_table("a", "b", "c")
    assert resident(table) == ["a", "b"]
    for name in ("b", "a"):
        table.acquire(name, name)
        table.release(name)
    settle(table)
    table.acquire("c", "r")
    drop, load, grant = settle(table)
    assert isinstance(drop, Drop)
    assert load == Load("c", "c", drop.slot)
    assert grant == Grant("r", drop.slot)
    assert resident(table) == ["a", "c"]


def test_who_has_users_never_leaves_and_who_came_waits_for_an_end() -> None:
    table = make_table("a", "b", "c")
    table.acquire("a", "ra")
    table.acquire("b", "rb")
    table.acquire("c", "rc")
    assert [type(action) for action in settle(table)] == [Grant, Grant]
    assert table.waiting == 1
    table.release("ra")
    assert [type(action) for action in settle(table)] == [Drop, Load, Grant]
    assert resident(table) == ["b", "c"]


def test_as_many_leave_as_make_room_in_bytes_and_none_in_vain() -> None:
    table = make_table("a", "b", "c", max_resident=4, budget=30)
    learn(table, "big", size=25)
    assert settle(table) == []  # nobody leaves for one that nobody has asked for
    table.acquire("b", "rb")
    settle(table)
    table.acquire("big", "r")
    assert settle(table) == []  # with b in use the others would leave for nothing
    table.release("rb")
    assert [type(action) for action in settle(table)] == [Drop, Drop, Drop, Load, Grant]
    assert resident(table) == ["big"]


def test_a_stream_of_requests_for_others_passes_nobody_over_for_ever() -> None:
    """One slot, and requests for ``a`` that always overlap. After a bounded number of them ``a`` is drained, ``b`` has its turn, and
    those of ``a`` that came meanwhile follow."""
    table = make_table("a", "b", max_resident=1)
    table.acquire("a", "a0")
    table.acquire("b", "waits")
    granted_before = 0
    for number in range(1, 2 * MAX_PASSED_OVER):
        table.acquire("a", f"a{number}")
        table.release(f"a{number - 1}")
        done = settle(table)
        if Grant("waits", 0) in done:
            break
        granted_before += any(isinstance(action, Grant) for action in done)
    assert granted_before == MAX_PASSED_OVER
    assert table.waiting == 1
    table.release("waits")
    assert [type(action) for action in settle(table)] == [Drop, Load, Grant]


def test_a_drain_ends_with_the_request_that_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_PASSED_OVER", 0)
    table = make_table("a", "b", max_resident=1)
    table.acquire("a", "a0")
    table.acquire("b", "waits")
    table.acquire("a", "a1")
    assert settle(table) == [Grant("a0", 0)]
    table.release("waits")
    assert settle(table) == [Grant("a1", 0)]


def test_requests_beyond_what_may_wait_are_told_so() -> None:
    table = make_table("a", "b", max_resident=1, max_waiting=1)
    table.acquire("a", "a0")
    table.acquire("b", "b0")
    table.acquire("b", "b1")
    assert settle(table)[-1] == Refusal("b1", "1 requests wait for adapters already", is_full=True)


def test_a_read_that_fails_refuses_those_who_waited_and_is_tried_again_for_the_next() -> None:
    table = make_table("a", "b", max_resident=1)
    table.acquire("b", "b0")
    table.acquire("b", "b1")
    assert [type(action) for action in table.take_actions()] == [Drop, Load]
    table.load_failed("b", "gone")
    assert table.take_actions() == [Refusal("b0", "gone"), Refusal("b1", "gone")]
    table.acquire("b", "b2")
    assert [type(action) for action in settle(table)] == [Load, Grant]


def test_a_pinned_adapter_is_read_at_once_and_never_leaves() -> None:
    table = make_table("a", "b")
    learn(table, "c", pinned=True)
    assert [type(action) for action in settle(table)] == [Drop, Load]
    for name in ("a", "b", "a", "b"):
        table.acquire(name, f"r{name}")
        settle(table)
        table.release(f"r{name}")
        assert "c" in resident(table)
    table.forget("c", 1)
    assert settle(table)[0] == Unloaded(1)


def test_pins_beyond_the_room_are_refused_with_the_numbers_and_change_nothing() -> None:
    table = make_table("a", "b", "c", budget=35)
    learn(table, "a", pinned=True)
    with pytest.raises(BudgetError, match=r"2 adapters of 40 bytes would be pinned, where 2 of 35 bytes"):
        learn(table, "big", size=30, pinned=True)
    learn(table, "b", pinned=True)
    with pytest.raises(BudgetError, match=r"3 adapters of 30 bytes would be pinned"):
        learn(table, "c", pinned=True)
    with pytest.raises(BudgetError, match="takes 36 bytes, all resident ones together may take 35"):
        learn(table, "a", "huge", size=36)
    assert [info.pinned for info in table.infos()] == [True, True, False]
    table.check_invariants()


def test_a_name_that_moves_to_another_content_leaves_the_old_one_to_its_users() -> None:
    table = make_table("x")
    table.acquire("x", "old")
    learn(table, "x", "y")
    settle(table)
    table.acquire("y", "new")
    table.acquire("x", "late")
    done = settle(table)
    assert [type(action) for action in done] == [Grant, Refusal]
    table.release("old")
    assert [type(action) for action in settle(table)] == [Drop]


def test_an_unload_waits_for_those_that_had_the_content_then_and_for_no_others() -> None:
    """Not for requests of the same content under another name that came later."""
    table = make_table("a")
    learn(table, "b", "a")
    table.acquire("a", "before")
    table.forget("a", 7)
    table.acquire("a", "after")
    assert not any(isinstance(action, Unloaded) for action in settle(table))
    table.release("before")
    assert settle(table) == [Unloaded(7)]
    with pytest.raises(NotFoundError):
        table.forget("a", 8)


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_NAMES", 2)
    table = make_table("a", "b")
    learn(table, "a", "other")
    with pytest.raises(BudgetError, match="at most 2 adapters can be loaded"):
        learn(table, "c")


def test_loads_failures_and_those_that_gave_way_are_counted() -> None:
    """What is unloaded gave way to nobody; a name of known content is read once."""
    table = make_table("a", "b")
    learn(table, "again", "a")
    learn(table, "c")
    table.acquire("c", "rc")
    settle(table)
    counts = table.counts()
    assert (counts.names, counts.resident, counts.resident_bytes) == (4, 2, 20)
    assert (counts.loads, counts.failed_loads, counts.evictions, counts.waiting_requests) == (3, 0, 1, 0)
    table.forget("b", 1)
    table.acquire("a", "ra")
    assert table.counts().waiting_requests == 1
    table.take_actions()
    table.load_failed("a", "broken")
    counts = table.counts()
    assert (counts.names, counts.resident) == (3, 1)
    assert (counts.loads, counts.failed_loads, counts.evictions, counts.waiting_requests) == (3, 1, 1, 0)


def test_the_table_sums_itself_up_in_a_line() -> None:
    table = make_table("a", "b", "c")
    table.acquire("a", "r")
    settle(table)
    assert (
        repr(table) == "<AdapterTable 3 names, AdapterPlaces(2 of 2 in 20 of 100 bytes) | 1 using, 0 waiting>"
    )


def test_a_content_is_read_from_where_a_name_that_is_left_found_it() -> None:
    """Two folders hold one content; the one that was named last is unloaded, and may be gone."""
    table = make_table("other", max_resident=1)
    for name in ("law", "law2"):
        table.learn(name, digest="3f", path=f"folder of {name}", rank=8, size_bytes=10, pinned=False)
    table.forget("law2", 1)
    settle(table)
    table.acquire("3f", "r")
    assert [action.path for action in settle(table) if isinstance(action, Load)] == ["folder of law"]


def test_no_place_beside_the_pinned_is_a_matter_of_room_and_not_of_the_request() -> None:
    table = make_table("a", max_resident=1)
    learn(table, "b", pinned=True)
    settle(table)
    table.acquire("a", "r")
    [refusal] = [action for action in settle(table) if isinstance(action, Refusal)]
    assert refusal.is_full
    assert "have no place" in refusal.problem
