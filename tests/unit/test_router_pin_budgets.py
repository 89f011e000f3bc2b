"""Whether a pin fits a fleet, and what is said where it does not."""

from prefixmesh.cache.tier import Tier
from prefixmesh.router.pins.budgets import OwnerUse, owner_use, why_it_does_not_fit
from prefixmesh.router.pins.wishes import Wish, WorkerSeen
from tests.support.pin_fleet import PinWorker, wish


def seen(*workers: PinWorker) -> list[WorkerSeen]:
    return [worker.seen(0.0) for worker in workers]


def held(worker: PinWorker, *wishes: Wish) -> PinWorker:
    for each in wishes:
        worker.pin(each)
    return worker


def test_a_wish_fits_where_as_many_workers_have_room_as_it_wants() -> None:
    assert why_it_does_not_fit(wish(size=60, replicas=2), [], seen(PinWorker("a"), PinWorker("b"))) == ""


def test_a_refusal_tells_the_owners_share_and_the_workers() -> None:
    a, b = PinWorker("a", budget=100, owner_budget=10), PinWorker("b", budget=6, owner_budget=6)
    problem = why_it_does_not_fit(wish(size=8, replicas=2), [wish("q", 4, replicas=1)], seen(a, b))
    assert problem == (
        "pin 'p' of owner 'alice': wanted on 2 of 2 workers, and 0 have room; "
        "a: 8 tokens wanted on the device, 6 of 10 are left to 'alice', 96 of 100 to all pins; "
        "b: 8 tokens wanted on the device, 6 of 6 are left to 'alice', 6 of 6 to all pins"
    )


def test_one_owners_wishes_leave_anothers_share() -> None:
    fleet = seen(PinWorker("a", budget=100, owner_budget=50))
    alices = [wish(f"p{i}", 10, replicas=1) for i in range(5)]
    assert why_it_does_not_fit(wish("more", 10, replicas=1), alices, fleet)
    assert why_it_does_not_fit(wish("his", 50, replicas=1, owner="bob"), alices, fleet) == ""


def test_wishes_are_thought_of_where_they_are_held() -> None:
    other = wish("q", 40, replicas=1)
    fleet = seen(PinWorker("a", budget=60), held(PinWorker("b", budget=60), other))
    assert why_it_does_not_fit(wish(size=60, replicas=1), [other], fleet) == ""


def test_workers_that_are_not_there_yet_are_not_asked_for() -> None:
    assert why_it_does_not_fit(wish(replicas=5), [], seen(PinWorker("a"))) == ""
    assert why_it_does_not_fit(wish(replicas=0), [], []) == ""
    assert why_it_does_not_fit(wish(size=99), [], seen(PinWorker("a", budget=-1, owner_budget=-1))) == ""


def test_all_workers_must_have_room_for_what_all_are_to_hold() -> None:
    problem = why_it_does_not_fit(wish(replicas=0), [], seen(PinWorker("a"), PinWorker("b", budget=4)))
    assert problem.startswith("pin 'p' of owner 'alice': wanted on 2 of 2 workers, and 1 have room; b: ")


def test_workers_that_drain_or_do_not_know_the_adapter_do_not_count() -> None:
    fleet = seen(
        PinWorker("a", adapters=frozenset({"d"})), PinWorker("b"), PinWorker("c", draining=True, budget=0)
    )
    assert why_it_does_not_fit(wish(replicas=2, adapter_digest="d"), [], fleet) == ""
    assert "of 1 workers" in why_it_does_not_fit(wish(size=90, adapter_digest="d"), [], fleet)


def test_heat_takes_no_room_and_what_others_have_pinned_does() -> None:
    hot = wish("h", 90, source="heat", owner="@heat", replicas=1)
    a = held(PinWorker("a", owner_budget=100), hot)
    assert why_it_does_not_fit(wish(size=60, replicas=1), [hot], seen(a)) == ""
    a.pins["by-hand"] = a.pins.pop(hot.pin_id)
    assert why_it_does_not_fit(wish(size=60, replicas=1), [], seen(a))


def test_a_new_version_must_find_room_beside_the_last_holder_of_the_old_one() -> None:
    old, new = wish(size=40, replicas=1), wish(size=40, replicas=1, generation=2)
    alone = held(PinWorker("a"), old)
    assert "beside the version before" in why_it_does_not_fit(new, [old], seen(alone))
    assert why_it_does_not_fit(new, [old], seen(alone, PinWorker("b"))) == ""
    assert why_it_does_not_fit(old, [old], seen(alone)) == ""
    two = wish(size=40, replicas=2)
    both = [held(PinWorker(name), two) for name in "ab"]
    assert why_it_does_not_fit(wish(size=40, replicas=2, generation=2), [two], seen(*both)) == ""


def test_a_prompt_shorter_than_a_page_is_refused_by_its_name() -> None:
    problem = why_it_does_not_fit(wish(size=7, replicas=1), [], seen(PinWorker("a", page_size=8)))
    assert problem.endswith("a: it is shorter than a page of 8 tokens")


def test_the_hosts_share_is_another_one() -> None:
    on_host = wish(tier=Tier.HOST, replicas=1)
    assert "on the host, 0 of 0" in why_it_does_not_fit(on_host, [], seen(PinWorker("a")))
    assert why_it_does_not_fit(on_host, [], seen(PinWorker("a", host_budget=8))) == ""


def test_an_owners_use_adds_up_what_workers_say() -> None:
    fleet = seen(held(PinWorker("a"), wish(), wish("q", owner="bob")), held(PinWorker("b"), wish()))
    assert owner_use("alice", fleet) == OwnerUse(charged_tokens=16, budget_tokens=120)
