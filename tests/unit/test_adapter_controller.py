"""The adapter controller, case by case: who loads first, how many at a time, what is tried again when, and what is believed."""

from collections.abc import Mapping, Sequence

import pytest

from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.controller import BELIEVED_S, AdapterController
from prefixmesh.router.adapters.orders import Ended, Load, Order, WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord, put_again, removed
from prefixmesh.router.adapters.troubles import Troubles
from prefixmesh.router.endpoint import Endpoint

CONFIG = AdapterControllerConfig()


def record(name: str = "clerk", *, digest: str = "", path: str = "a", pinned: bool = False) -> AdapterRecord:
    return put_again(None, pb.AdapterSpec(name=name, path=path, pinned=pinned))._replace(digest=digest)


def worker(
    name: str, *, life: int = 1, ready: bool = True, pinned: Sequence[str] = (), **has: str
) -> WorkerSeen:
    return WorkerSeen(Endpoint(name), Incarnation(life), ready, True, has, frozenset(pinned))


def wished(*records: AdapterRecord) -> Mapping[str, AdapterRecord]:
    return {one.name: one for one in records}


def loads(orders: Sequence[Order]) -> list[tuple[str, str]]:
    return [(order.endpoint, order.name) for order in orders if isinstance(order, Load)]


def test_one_worker_finds_out_what_it_is_and_the_others_follow() -> None:
    controller, wishes = AdapterController(), wished(record())
    workers = [worker(f"w{i}") for i in range(4)]
    (first,) = controller.step(0.0, wishes, workers)
    assert controller.step(1.0, wishes, workers) == []
    controller.ended(first, Ended(digest="d1"), 2.0)
    assert controller.found() == [record(digest="d1")]
    workers[0] = worker("w0", clerk="d1")
    assert loads(controller.step(2.0, wishes, workers)) == [("w1", "clerk"), ("w2", "clerk"), ("w3", "clerk")]
    assert controller.standing(workers[0], "clerk").state == "held"
    assert controller.standing(workers[1], "clerk").state == "loading"


def test_who_takes_over_orders_nothing_that_is_there() -> None:
    """A worker's own word is enough, where the record says what it is to be."""
    wishes = wished(record(digest="d1"), record("poet", digest="d2", pinned=True))
    has = worker("w0", clerk="d1", poet="d2", pinned=["poet"], own="d9")
    assert AdapterController().step(0.0, wishes, [has]) == []
    assert loads(AdapterController().step(0.0, wishes, [worker("w0", clerk="d1", poet="d2")])) == [
        ("w0", "poet")
    ]
    assert AdapterController().step(0.0, None, [worker("w0")]) == [], "the store was not read"
    assert AdapterController().step(0.0, wishes, [worker("w0")], acts=False) == []
    assert AdapterController().step(0.0, wishes, [worker("w0", ready=False)]) == []


def test_worker_loads_one_adapter_after_the_other() -> None:
    """In the order of their names; what is not there at all before what has another content."""
    wishes = wished(*(record(f"n{i}", digest="new") for i in range(3)))
    controller, seen = AdapterController(), worker("w0", n0="old")
    (first,) = controller.step(0.0, wishes, [seen])
    assert controller.step(1.0, wishes, [seen]) == []
    controller.ended(first, Ended(digest="new"), 1.0)
    (second,) = controller.step(1.0, wishes, [worker("w0", n0="old", n1="new")])
    controller.ended(second, Ended(digest="new"), 2.0)
    (third,) = controller.step(2.0, wishes, [worker("w0", n0="old", n1="new", n2="new")])
    assert [order.name for order in (first, second, third)] == ["n1", "n2", "n0"]


def test_loads_are_bounded_and_whoever_waits_longest_is_next() -> None:
    """One a worker, 16 in the fleet, and no worker has its second adapter before all have their first."""
    wishes = wished(*(record(f"n{i}", digest=f"d{i}") for i in range(2)))
    controller = AdapterController()
    workers = {f"w{i:02}": worker(f"w{i:02}") for i in range(20)}
    first = controller.step(0.0, wishes, list(workers.values()))
    assert len(loads(first)) == len({order.endpoint for order in first}) == CONFIG.max_loads == 16
    controller.ended(first[0], Ended("too busy"), 0.5)
    assert [endpoint for endpoint, _ in loads(controller.step(0.5, wishes, list(workers.values())))] == [
        "w16"
    ]
    for order in first[1:]:
        controller.ended(order, Ended(digest="d0"), 1.0)
        workers[order.endpoint] = worker(order.endpoint, n0="d0")
    second = controller.step(1.0, wishes, list(workers.values()))
    assert [endpoint for endpoint, _ in loads(second)[:4]] == ["w17", "w18", "w19", "w00"]
    controller.check_invariants()


def test_an_eighth_changes_at_a_time_a_second_apart() -> None:
    """Those that have nothing under the name wait for nobody."""
    wishes = wished(record(digest="new"))
    controller = AdapterController()
    workers = {f"w{i:02}": worker(f"w{i:02}", clerk="old") for i in range(16)}
    workers["w99"] = worker("w99")
    orders = controller.step(0.0, wishes, list(workers.values()))
    assert len(orders) == 3
    assert ("w99", "clerk") in loads(orders)
    for order in orders:
        controller.ended(order, Ended(digest="new"), 0.5)
        workers[order.endpoint] = worker(order.endpoint, clerk="new")
    assert controller.step(0.6, wishes, list(workers.values())) == []
    assert len(controller.step(1.6, wishes, list(workers.values()))) == 2


def test_load_of_a_version_that_is_wished_no_more_counts_as_a_change() -> None:
    """It was to pin what the worker had; by now the folder may hold something else, and no second worker changes beside it."""
    before = record(digest="old", pinned=True)
    controller, workers = AdapterController(), [worker(f"w{i}", clerk="old") for i in range(2)]
    pinning = controller.step(0.0, wished(before), workers[:1])
    assert loads(pinning) == [("w0", "clerk")]
    newer = put_again(put_again(before, before.spec)._replace(digest="new"), before.spec)
    assert controller.step(0.5, wished(newer), workers) == []
    controller.ended(pinning[0], Ended(digest="new"), 1.0)
    assert loads(controller.step(1.0 + CONFIG.settle_s, wished(newer), workers)) == [("w1", "clerk")]


def test_what_failed_is_tried_again_soon_and_what_was_refused_slowly() -> None:
    """With pauses that double; put again, everything begins anew."""
    controller, before = AdapterController(), record(digest="d1")
    wishes, workers = wished(before), [worker("w0")]

    def next_at(now: float) -> float:
        while not (orders := controller.step(now, wishes, workers)):
            now += 0.5
        controller.ended(orders[0], ended, now)
        return now

    ended = Ended("too busy")
    assert [next_at(t) for t in (0.0, 0.1, 1.1, 3.1)] == [0.0, 1.1, 3.1, 7.1]
    assert controller.standing(workers[0], "clerk").state == "failed"
    ended = Ended("no such folder", is_refused=True)
    assert next_at(15.1) == 15.1
    standing = controller.standing(workers[0], "clerk")
    assert standing.state == "refused"
    assert standing.failure is not None
    assert standing.failure.problem == "no such folder"
    assert next_at(15.2) >= 45.1
    wishes = wished(put_again(before, before.spec))
    assert loads(controller.step(46.0, wishes, workers)) == [("w0", "clerk")]
    assert controller.standing(workers[0], "clerk").state == "loading"


def test_what_has_failed_everywhere_is_not_looked_at_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is to be tried again; whoever joins is asked at once, and what is put again is."""
    looked_at: list[str] = []
    paused_until = Troubles.paused_until

    def counted(troubles: Troubles, seen: WorkerSeen, name: str, generation: int, *, is_load: bool) -> float:
        looked_at.append(name)
        return paused_until(troubles, seen, name, generation, is_load=is_load)

    monkeypatch.setattr(Troubles, "paused_until", counted)
    controller, before = AdapterController(), record("sought")
    wishes, workers = wished(record("known", digest="d1"), before), [worker(f"w{i}") for i in range(3)]
    while orders := controller.step(0.0, wishes, workers):
        for order in orders:
            controller.ended(order, Ended("no such folder", is_refused=True), 0.0)
    looked_at.clear()
    assert controller.step(1.0, wishes, workers) == []
    assert looked_at == []
    assert loads(controller.step(2.0, wishes, [*workers, worker("w3")])) == [("w3", "sought")]
    assert len(loads(controller.step(CONFIG.refused_pause_s, wishes, workers))) == 3
    controller = AdapterController()
    for at in (0.0, 0.0, 0.0):
        for order in controller.step(at, wished(before), workers):
            controller.ended(order, Ended("no such folder", is_refused=True), at)
    assert controller.step(1.0, wished(before), workers) == []
    assert len(loads(controller.step(2.0, wished(put_again(before, before.spec)), workers))) == 1


def test_another_content_than_the_first_ones_is_a_problem() -> None:
    controller, wishes = AdapterController(), wished(record(digest="d" * 20))
    (order,) = controller.step(0.0, wishes, [worker("w0")])
    controller.ended(order, Ended(digest="e" * 20), 0.0)
    seen = worker("w0", clerk="e" * 20)
    assert controller.step(1.0, wishes, [seen]) == []
    standing = controller.standing(seen, "clerk")
    assert standing.state == "refused"
    assert standing.failure is not None
    assert "holds other weights (eeeeeeeeeeee)" in standing.failure.problem


def test_worker_that_only_says_so_is_not_asked_without_end() -> None:
    """It is believed for a while; then it has failed."""
    controller, wishes, workers = AdapterController(), wished(record(digest="d1")), [worker("w0")]
    (order,) = controller.step(0.0, wishes, workers)
    controller.ended(order, Ended(digest="d1"), 0.0)
    assert controller.step(BELIEVED_S - 0.1, wishes, workers) == []
    assert controller.step(BELIEVED_S, wishes, workers) == []
    assert controller.standing(workers[0], "clerk").state == "failed"
    assert len(controller.step(BELIEVED_S + 1.0, wishes, workers)) == 1


def test_worker_that_does_not_say_what_it_has_loaded_has_failed() -> None:
    """Nothing is found out by it, and it is not asked again at once."""
    sought = put_again(record(digest="d1"), pb.AdapterSpec(name="clerk", path="b"))
    controller, wishes, workers = AdapterController(), wished(sought), [worker("w0", clerk="d1")]
    (order,) = controller.step(0.0, wishes, workers)
    controller.ended(order, Ended(), 0.0)
    assert controller.found() == []
    assert controller.step(0.9, wishes, workers) == []
    assert controller.standing(workers[0], "clerk").state == "failed"


def test_version_before_is_for_those_alone_that_have_nothing_under_the_name() -> None:
    """While another is sought: whoever has the new one already, found by a router that has gone since, keeps it."""
    sought = put_again(record(digest="d1"), pb.AdapterSpec(name="clerk", path="b"))
    workers = [worker("w0", clerk="d2"), worker("w1", clerk="d1"), worker("w2")]
    controller = AdapterController(AdapterControllerConfig(roll_share=1.0))
    orders = controller.step(0.0, wished(sought), workers)
    assert [
        (order.endpoint, order.path, order.generation) for order in orders if isinstance(order, Load)
    ] == [
        ("w0", "b", 2),
        ("w2", "a", 1),
    ]
    controller.ended(orders[0], Ended("no such folder", is_refused=True), 0.0)
    controller.ended(orders[1], Ended(digest="d1"), 0.0)
    workers[2] = worker("w2", clerk="d1")
    (second,) = controller.step(1.0, wished(sought), workers)
    assert (second.endpoint, second.generation) == ("w1", 2)


def test_removed_name_leaves_whoever_can_be_reached_and_nothing_else() -> None:
    """Ready or not; a name that the store never knew stays."""
    wishes = wished(removed(record(digest="d1"), 5))
    away = worker("w1", clerk="d1")._replace(is_ready=False, is_reachable=False)
    workers = [worker("w0", clerk="d1", own="d9"), away, worker("w2", ready=False, clerk="other")]
    controller = AdapterController()
    orders = controller.step(0.0, wishes, workers)
    assert [(order.endpoint, order.name) for order in orders] == [("w0", "clerk"), ("w2", "clerk")]
    assert controller.step(1.0, wishes, workers) == []
    for order in orders:
        controller.ended(order, Ended(), 1.0)
    workers = [worker("w0", own="d9"), worker("w1", clerk="d1"), worker("w2", ready=False)]
    (late,) = controller.step(2.0, wishes, workers)
    assert late.endpoint == "w1"


def test_name_that_a_worker_tells_no_more_is_forgotten_while_requests_by_it_run() -> None:
    """Its answer comes when these have ended; the next worker does not wait for that."""
    controller = AdapterController(AdapterControllerConfig(max_unloads=1))
    wishes, workers = wished(removed(record(digest="d1"), 5)), [worker(f"w{i}", clerk="d1") for i in range(2)]
    (first,) = controller.step(0.0, wishes, workers)
    assert controller.step(1.0, wishes, [workers[0]._replace(is_reachable=False), workers[1]]) == []
    workers[0] = worker("w0")
    (second,) = controller.step(2.0, wishes, workers)
    assert (first.endpoint, second.endpoint) == ("w0", "w1")
    controller.ended(first, Ended("it took too long"), 3.0)
    workers[0] = worker("w0", clerk="d1")
    controller.ended(second, Ended(), 3.0)
    (again,) = controller.step(3.0, wishes, workers)
    assert again.endpoint == "w0", "and what becomes of the first answer does not count"


def test_orders_of_a_life_that_is_over_are_forgotten() -> None:
    """The next life is asked at once, and what comes of the old order is not believed."""
    controller, wishes = AdapterController(), wished(record())
    (old,) = controller.step(0.0, wishes, [worker("w0")])
    (new,) = controller.step(0.5, wishes, [worker("w0", life=2)])
    controller.ended(old, Ended(digest="d0"), 1.0)
    assert controller.found() == []
    controller.ended(new, Ended(digest="d1"), 1.0)
    assert controller.found() == [record(digest="d1")]


def test_names_that_nobody_can_load_leave_room_for_what_is_known() -> None:
    """Half of the loads at most go into finding out what names are, and each of these has its turn."""
    config = AdapterControllerConfig(max_loads=2)
    wishes = wished(*(record(f"bad{i}") for i in range(3)), record("good", digest="d1"))
    controller, workers = AdapterController(config), [worker(f"w{i}") for i in range(6)]
    sought = set()
    for now in range(6):
        orders = controller.step(float(now), wishes, workers)
        names = [order.name for order in orders]
        assert names[1:] == ["good"]
        sought.add(names[0])
        for order in orders:
            is_good = order.name == "good"
            ended = Ended(digest="d1") if is_good else Ended("no such folder", is_refused=True)
            controller.ended(order, ended, float(now))
    assert sought == {"bad0", "bad1", "bad2"}
