"""The pin controller, case by case: who is chosen, what is let go and when, and what an operator is told."""

import itertools
from dataclasses import replace

import pytest

from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.wishes import Warm
from tests.support.pin_fleet import BLOCK, PinFleet, PinWorker, unpins, warms, wish


def fleet(*workers: PinWorker, **config: float) -> PinFleet:
    return PinFleet(PinController(PinControllerConfig(block_size=BLOCK, **config)), *workers)  # type: ignore[arg-type]


def three(**config: float) -> PinFleet:
    return fleet(PinWorker("a"), PinWorker("b"), PinWorker("c"), **config)


def test_a_wish_comes_to_be_held_by_as_many_workers_as_it_wants() -> None:
    f, w = three(), wish(replicas=2)
    f.settle([w])
    assert f.holders(w) == ["a", "b"]
    status = f.controller.status(w)
    assert (status.wanted, status.held, status.missing, status.why) == (2, 2, 0, "")
    assert [replica.state for replica in status.replicas] == ["held", "held"]


def test_a_lost_holder_is_replaced_and_nothing_else_moves() -> None:
    f, w = three(), wish(replicas=2)
    f.settle([w])
    del f.workers["a"]
    assert warms(f.settle([w])) == [("c", w.pin_id)]
    assert f.holders(w) == ["b", "c"]


def test_a_holder_that_restarts_or_is_flushed_is_warmed_again() -> None:
    f, w = three(), wish(replicas=3)
    f.settle([w])
    f.workers["a"].restart()
    f.workers["b"].flush()
    assert sorted(warms(f.settle([w]))) == [("a", w.pin_id), ("b", w.pin_id)]
    assert f.holders(w) == ["a", "b", "c"]


def test_a_worker_that_joins_gets_what_all_are_to_have() -> None:
    f, w = three(), wish(replicas=0)
    f.settle([w])
    f.workers["d"] = PinWorker("d")
    assert warms(f.settle([w])) == [("d", w.pin_id)]
    assert f.controller.status(w).wanted == 4


def test_a_worker_that_drains_is_copied_from_and_not_counted() -> None:
    f, w = three(), wish(replicas=1)
    f.settle([w])
    f.workers["a"].draining = True
    (order,) = f.step([w])
    assert isinstance(order, Warm)
    assert order.endpoint == "b"
    assert [source.address for source in order.sources] == ["a"]


def test_a_worker_that_blinks_moves_nothing() -> None:
    f, w = three(patience_s=2.0), wish(replicas=2)
    f.settle([w])
    f.workers["a"].usable = False
    assert f.step([w]) == []
    f.workers["a"].usable = True
    assert f.step([w]) == []


def test_a_worker_that_stays_away_is_replaced_and_let_go_of_when_it_is_back() -> None:
    f, w = three(patience_s=2.0), wish(replicas=2)
    f.settle([w])
    f.workers["a"].usable = False
    f.step([w])
    f.now += 2.0
    assert warms(f.settle([w])) == [("c", w.pin_id)]
    f.workers["a"].usable = True
    assert len(unpins(f.settle([w]))) == 1
    assert len(f.holders(w)) == 2


def test_a_router_that_starts_waits_for_workers_that_it_knows() -> None:
    f, w = three(patience_s=2.0), wish(replicas=2)
    f.settle([w])
    f.controller = PinController(PinControllerConfig(block_size=BLOCK))
    budget = f.workers["b"].budget
    f.workers["b"].usable, f.workers["b"].budget = False, -1
    assert f.step([w], after_s=0.5) == []
    f.workers["b"].usable, f.workers["b"].budget = True, budget
    assert f.step([w], after_s=0.5) == []


@pytest.mark.parametrize("field", ["host", "work_ms"])
def test_workers_are_chosen_on_other_hosts_and_where_least_is_to_do(field: str) -> None:
    busy = {"host": {"host": "h1"}, "work_ms": {"work_ms": 5_000.0}}[field]
    f = fleet(PinWorker("a", host="h1"), PinWorker("b", **busy), PinWorker("c", host="h2"))  # type: ignore[arg-type]
    w = wish(replicas=2)
    f.settle([w])
    assert f.holders(w) == ["a", "c"]


def test_who_has_it_cached_is_chosen_before_anybody_else() -> None:
    f, w = three(), wish(replicas=1)
    f.workers["c"].cached[w.pin_id] = 8
    f.settle([w])
    assert f.holders(w) == ["c"]


def test_who_could_copy_it_is_chosen_before_who_must_compute() -> None:
    f = fleet(PinWorker("a"), PinWorker("b", layout="other"), PinWorker("c"))
    w = wish(replicas=2)
    f.settle([w])
    assert f.holders(w) == ["a", "c"]


def test_what_nobody_has_is_computed_once_and_copied_then() -> None:
    f, w = three(first_alone_s=20.0), wish(replicas=3)
    (order,) = f.step([w])
    assert isinstance(order, Warm)
    assert not order.sources
    assert f.step([w], after_s=19.0) == []
    f.workers[order.endpoint].perform(order)
    f.controller.ended(order.number, "", f.now)
    others = f.step([w])
    assert [[source.address for source in other.sources] for other in others if isinstance(other, Warm)] == [
        ["a"]
    ] * 2


def test_a_part_that_its_maker_already_has_is_not_copied_while_the_rest_is_computed() -> None:
    """Otherwise all would compute the rest of a prompt that takes several steps."""
    f, w = three(first_alone_s=20.0), wish(replicas=3)
    (order,) = f.step([w])
    f.workers[order.endpoint].cached[w.pin_id] = BLOCK
    assert f.step([w]) == []
    assert warms(f.step([w], after_s=20.0)) == [("b", w.pin_id)]


def test_what_somebody_has_whole_is_copied_by_all_at_once() -> None:
    f, w = three(), wish(size=2 * BLOCK + 1, replicas=2)
    f.workers["c"].cached[w.pin_id] = 2 * BLOCK
    f.workers["c"].draining = True
    assert warms(f.step([w])) == [("a", w.pin_id), ("b", w.pin_id)]


def test_one_that_takes_long_to_compute_is_not_waited_for() -> None:
    f, w = three(first_alone_s=20.0), wish(replicas=2)
    f.step([w])
    assert warms(f.step([w], after_s=20.0)) == [("b", w.pin_id)]


def test_moves_under_way_are_bounded_for_each_worker_and_in_all() -> None:
    f = three(max_moves=3, max_moves_per_worker=2)
    wishes = [wish(f"p{i}", replicas=1) for i in range(9)]
    orders = warms(f.step(wishes))
    assert len(orders) == 3
    assert f.step(wishes) == []
    alone = fleet(PinWorker("a"), max_moves=3, max_moves_per_worker=2)
    assert len(alone.step(wishes)) == 2


def test_what_fails_is_asked_for_elsewhere_and_later_again() -> None:
    f, w = fleet(PinWorker("a"), PinWorker("b"), first_pause_s=4.0), wish(replicas=1)
    (order,) = f.step([w])
    f.controller.ended(order.number, "the device is on fire", f.now)
    (other,) = f.step([w])
    assert (order.endpoint, other.endpoint) == ("a", "b")
    f.controller.ended(other.number, "the device is on fire", f.now)
    assert f.step([w]) == []
    assert (
        "a: failed 1 times in a row, asked again in 2 s: the device is on fire" in f.controller.status(w).why
    )
    f.now += 4.0
    assert len(f.step([w])) == 1


def test_pauses_double_up_to_the_longest() -> None:
    f, w = fleet(PinWorker("a"), first_pause_s=1.0, longest_pause_s=8.0), wish(replicas=1)
    asked: list[float] = []
    while len(asked) < 7:
        for order in f.step([w], after_s=0.5):
            asked.append(f.now)
            f.controller.ended(order.number, "no", f.now)
    assert [b - a for a, b in itertools.pairwise(asked)] == [1, 2, 4, 8, 8, 8]


def test_an_action_that_is_never_heard_of_ends_by_its_time_limit() -> None:
    f, w = fleet(PinWorker("a"), PinWorker("b"), warm_timeout_s=30.0), wish(replicas=1)
    (order,) = f.step([w])
    assert f.step([w], after_s=29.0) == []
    (other,) = f.step([w], after_s=1.0)
    assert other.endpoint == "b"
    f.controller.ended(order.number, "", f.now)  # far too late
    assert "no answer within 30 s" in f.controller.status(w).why


def test_a_pin_counts_when_the_worker_says_so_and_its_events_prove_it() -> None:
    f, w = fleet(PinWorker("a")), wish(replicas=1)
    f.settle([w])
    f.workers["a"].cached = {}
    f.step([w])
    status = f.controller.status(w)
    assert status.held == 0
    assert status.why == "a: waiting for its events to prove that it holds it"


def test_a_proof_that_does_not_come_is_not_waited_for_for_ever() -> None:
    f, w = fleet(PinWorker("a"), PinWorker("b"), proof_within_s=30.0), wish(replicas=1)
    f.settle([w])
    f.workers["a"].cached = {}
    f.step([w])
    assert warms(f.step([w], after_s=30.0)) == [("b", w.pin_id)]


def test_a_worker_that_says_it_is_done_and_lacks_the_pin_is_left_alone_for_longer_and_longer() -> None:
    f, w = fleet(PinWorker("a")), wish(replicas=1)
    asked = 0
    for _ in range(60):
        for order in f.step([w]):
            asked += 1
            f.controller.ended(order.number, "", f.now)
    assert 3 <= asked <= 8


def test_a_new_version_is_held_before_the_old_one_goes_worker_by_worker() -> None:
    f, old, new = three(max_moves=1), wish(replicas=2), wish(replicas=2, generation=2)
    f.settle([old])
    orders = f.settle([new])
    assert warms(orders) == [("a", new.pin_id), ("b", new.pin_id)]
    assert [type(order).__name__ for order in orders] == ["Warm", "Unpin", "Warm", "Unpin"]
    assert f.holders(old) == []
    assert f.holders(new) == ["a", "b"]


def test_without_room_for_both_versions_one_replica_goes_at_a_time() -> None:
    f = fleet(PinWorker("a", budget=10), PinWorker("b", budget=10))
    old, new = wish(replicas=2), wish(replicas=2, generation=2)
    f.settle([old])
    orders = f.settle([new])
    assert [type(order).__name__ for order in orders] == ["Unpin", "Warm", "Unpin", "Warm"]
    assert f.holders(new) == ["a", "b"]


def test_the_last_holder_of_the_old_version_stays_where_there_is_no_room_for_both() -> None:
    f = fleet(PinWorker("a", budget=10))
    old, new = wish(replicas=1), wish(replicas=1, generation=2)
    f.settle([old])
    assert f.settle([new]) == []
    assert f.holders(old) == ["a"]
    assert f.controller.status(new).why == (
        "a: no room for 8 tokens on the device: of 60 for pins of 'alice' 52 are free, of 10 for all pins 2, "
        "beside the version before, which stays until another worker holds this one"
    )


def test_a_worker_that_waits_for_its_turn_is_not_told_to_lack_the_room_that_was_set_aside_for_it() -> None:
    f, w = fleet(PinWorker("a", budget=10), PinWorker("b", budget=10)), wish(replicas=2)
    (order,) = f.step([w])
    assert (order.endpoint, f.controller.status(w).why) == (
        "a",
        "a: is being warmed; b: is next, when a move is free",
    )


def test_what_is_removed_or_expired_or_wanted_by_fewer_is_let_go_at_once() -> None:
    f = three()
    gone, ends, fewer = wish("gone"), wish("ends", expires_at=150.0), wish("fewer", replicas=3)
    f.settle([gone, ends, fewer])
    f.now = 150.0
    orders = f.step([ends, wish("fewer", replicas=1)])
    assert len(orders) == len(unpins(orders)) == 6


def test_nothing_is_let_go_while_the_wishes_are_not_known() -> None:
    f, w, hot = three(), wish(), wish("h", source="heat", owner="@heat")
    f.settle([w, hot])
    assert f.step(None) == []
    assert f.step([w], heat_is_known=False) == []
    assert len(unpins(f.step([w]))) == 2


def test_a_controller_that_does_not_act_tells_how_things_are() -> None:
    f, w = three(), wish()
    f.settle([w])
    seen = [worker.seen(f.now) for worker in f.workers.values()]
    looker = PinController(PinControllerConfig(block_size=BLOCK))
    assert looker.step(f.now, [w, wish("q")], seen, acts=False) == []
    assert looker.status(w).held == 2
    assert looker.status(wish("q")).held == 0


def test_pins_that_somebody_else_has_named_are_charged_and_left_alone() -> None:
    f, w = fleet(PinWorker("a", budget=10)), wish(replicas=1)
    f.settle([wish("mine", 4, replicas=1)])
    f.workers["a"].pins["by-hand"] = f.workers["a"].pins.pop("pin/alice/mine@1")
    assert f.settle([w]) == []
    assert "of 10 for all pins 6" in f.controller.status(w).why


def test_heat_takes_what_is_left_and_gives_way_to_pins() -> None:
    f = fleet(PinWorker("a", budget=16))
    hot, w = wish("h", 8, source="heat", owner="@heat", replicas=1), wish("p", 16, replicas=1)
    f.settle([hot])
    orders = f.settle([w, hot])
    assert unpins(orders) == [("a", hot.pin_id)]
    assert warms(orders) == [("a", w.pin_id)]
    assert f.controller.status(hot).held == 0


def test_owners_do_not_touch_each_others_share() -> None:
    f = fleet(PinWorker("a", budget=100, owner_budget=16))
    alices = [wish(f"p{i}", replicas=1) for i in range(5)]
    bobs = wish("b", replicas=1, owner="bob")
    f.settle([*alices, bobs])
    assert len(f.workers["a"].pins) == 3
    assert f.holders(bobs) == ["a"]


def test_a_wish_that_needs_an_adapter_goes_where_it_is_known() -> None:
    f = fleet(PinWorker("a"), PinWorker("b", adapters=frozenset({"d1"})))
    w = wish(replicas=2, adapter_digest="d1")
    f.settle([w])
    assert f.holders(w) == ["b"]
    assert f.controller.status(w).why == "a: needs the adapter 'd1', and does not have it"


def test_an_adapter_alone_is_made_resident_and_never_let_go() -> None:
    f = fleet(PinWorker("a", adapters=frozenset({"d1"})), PinWorker("b", adapters=frozenset({"d1"})))
    w = wish("x", 0, source="heat", owner="@heat", replicas=1, adapter_digest="d1")
    f.settle([w])
    assert [worker.resident for worker in f.workers.values()] == [{"d1"}, set()]
    assert f.controller.status(w).held == 1
    assert f.settle([]) == []


def test_a_pin_whose_time_is_to_begin_anew_is_asked_for_again() -> None:
    f = fleet(PinWorker("a"))
    f.settle([wish(replicas=1, expires_at=200.0)])
    orders = f.settle([wish(replicas=1, expires_at=300.0)])
    assert warms(orders) == [("a", "pin/alice/p@1")]
    assert f.workers["a"].pins["pin/alice/p@1"].expires_at == 300.0


def test_a_pin_that_leaves_is_counted_on_no_more() -> None:
    f, w = three(), wish(replicas=2)
    f.settle([w])
    assert len(unpins(f.step([wish(replicas=1)]))) == 1
    assert warms(f.step([w])) == [("c", w.pin_id)]
    assert f.controller.status(w).held == 1


def test_a_pin_that_may_have_been_let_go_is_counted_on_when_a_new_list_has_it() -> None:
    f, w = three(), wish(replicas=2)
    f.settle([w])
    asked_at = f.now
    (order,) = f.step([wish(replicas=1)])
    f.controller.ended(order.number, "no answer", f.now)
    old = [replace(worker.seen(f.now), pins_at=asked_at) for worker in f.workers.values()]
    f.controller.step(f.now, [w], old, acts=False)
    assert f.controller.status(w).held == 1
    f.controller.step(f.now, [w], [worker.seen(f.now + 1) for worker in f.workers.values()], acts=False)
    assert f.controller.status(w).held == 2
