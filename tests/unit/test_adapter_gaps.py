"""What workers lack, found anew each time and only where something has changed: the same."""

import random

from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapters.gaps import NO_GAPS, GapFinder, Gaps, gaps_of
from prefixmesh.router.adapters.orders import WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord, put_again, removed
from prefixmesh.router.adapters.wishes import Wishes
from prefixmesh.router.endpoint import Endpoint

NAMES = [f"n{number}" for number in range(5)]
DIGESTS = ("d0", "d1")


def some_worker(rng: random.Random, name: str) -> WorkerSeen:
    has = {one: rng.choice(DIGESTS) for one in NAMES if rng.random() < 0.5}
    pinned = frozenset(one for one in has if rng.random() < 0.3)
    is_reachable = rng.random() < 0.8
    return WorkerSeen(
        Endpoint(name), Incarnation(1), is_reachable and rng.random() < 0.8, is_reachable, has, pinned
    )


def some_record(rng: random.Random, before: AdapterRecord | None, name: str) -> AdapterRecord:
    spec = pb.AdapterSpec(name=name, path="a", pinned=rng.random() < 0.3)
    record = put_again(before, spec)
    if rng.random() < 0.3:
        return removed(record, 5)
    return record._replace(digest=rng.choice(("", *DIGESTS)))


def test_what_is_remembered_is_what_would_be_found_anew() -> None:
    """Workers change, come and go, wishes change one or several at a time, and some workers are looked at ahead."""
    rng, finder, wishes = random.Random(1), GapFinder(), Wishes()
    records: dict[str, AdapterRecord] = {}
    workers = {f"w{number}": some_worker(rng, f"w{number}") for number in range(6)}
    with_gaps = 0
    for _ in range(400):
        for name in rng.sample(NAMES, rng.choice((0, 0, 1, 2))):
            if name in records and rng.random() < 0.2:
                records = {one: record for one, record in records.items() if one != name}
            else:
                records = {**records, name: some_record(rng, records.get(name), name)}
        wishes.take_over(records)
        for name in rng.sample(sorted(workers), rng.choice((0, 0, 1, 3))):
            workers[name] = some_worker(rng, name)
        present = [workers[name] for name in sorted(workers) if rng.random() < 0.9]
        finder.look(wishes.by_name, present[: rng.randrange(len(present) + 1)])
        found = finder.find(wishes.by_name, present)
        anew = {seen.endpoint: gaps_of(wishes.by_name, seen, wishes.by_name) for seen in present}
        assert found == {endpoint: gaps for endpoint, gaps in anew.items() if gaps != NO_GAPS}
        with_gaps += len(found)
    assert with_gaps > 500


def test_what_a_worker_does_not_have_at_all_comes_first() -> None:
    wishes = Wishes()
    wishes.take_over(
        {name: put_again(None, pb.AdapterSpec(name=name, path="a"))._replace(digest="d1") for name in NAMES}
    )
    seen = WorkerSeen(Endpoint("w"), Incarnation(1), True, True, {"n0": "d0", "n2": "d1"}, frozenset())
    assert gaps_of(wishes.by_name, seen, wishes.by_name) == Gaps(("n1", "n3", "n4", "n0"), ())
