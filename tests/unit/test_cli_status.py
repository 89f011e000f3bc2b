"""What ``prefixmesh status`` says of a worker's cache, and of what its fleet's parts have lived through."""

import json

import pytest

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.cli.status import as_dict, describe_age, describe_left, hit_share, print_parts
from prefixmesh.errors import UnavailableError
from prefixmesh.fleet_state import FleetState, PartState
from prefixmesh.proto.cache_counts import decode_cache_counts, encode_cache_counts
from prefixmesh.proto.v1.router_pb2 import WorkerView

ROW = LedgerRow(2, 40, Hits(device=10, host=5), Misses(never_seen=11, evicted=7, other_namespace=4, tail=3))
NOTHING = LedgerRow(0, 0, Hits(), Misses())


def shown(worker: WorkerView) -> object:
    return json.loads(json.dumps(as_dict("r:1", None, [worker])))["workers"][0]["cache"]


def test_the_wire_carries_every_count() -> None:
    """None of them is taken for another."""
    assert decode_cache_counts(encode_cache_counts(ROW)) == ROW


def test_json_names_the_tiers_of_hits_and_the_causes_of_misses() -> None:
    """And the rate, which is null while nothing was asked for."""
    assert shown(WorkerView(cache=encode_cache_counts(ROW))) == {
        "requests": 2,
        "prompt_tokens": 40,
        "hit_tokens": {"device": 10, "host": 5, "disk": 0},
        "miss_tokens": {"never_seen": 11, "evicted": 7, "other_namespace": 4, "tail": 3},
        "cache_hit_rate": 0.375,
        "hit_rates": {"device": 0.25, "host": 0.125, "disk": 0.0},
    }
    idle = shown(WorkerView(cache=encode_cache_counts(NOTHING)))
    assert isinstance(idle, dict)
    assert idle["cache_hit_rate"] is None
    assert idle["hit_rates"] == {"device": None, "host": None, "disk": None}


def test_the_table_shows_the_workers_own_rate() -> None:
    """All its callers count, not only this router's; of a worker that does not tell, the router's own figures are shown."""

    def view(row: LedgerRow | None) -> WorkerView:
        counts = None if row is None else encode_cache_counts(row)
        return WorkerView(prompt_tokens=100, cached_tokens=90, cache=counts)

    assert [hit_share(view(row)) for row in (ROW, NOTHING, None)] == ["38%", "-", "90%"]
    assert hit_share(WorkerView()) == "-"
    assert shown(view(None)) is None


def test_parts_are_told_with_what_they_have_lived_through() -> None:
    """For programs as it was written down; a fleet that nobody looks after has none."""
    part = PartState(
        name="worker-0",
        kind="worker",
        phase="given_up",
        life=6,
        since_unix_s=1000.5,
        restarts=5,
        reason="given up after 5 restarts in a row: no memory",
    )
    state = FleetState(
        router="r:1",
        workers={},
        model="m",
        ray_address="h:1",
        ray_namespace="n",
        actor_names=(),
        started_ray=True,
        pid=1,
        parts=(part,),
    )
    (told,) = json.loads(json.dumps(as_dict("r:1", state, [], UnavailableError("nobody answers"))))["parts"]
    assert (told["phase"], told["life"], told["restarts"], told["since_unix_s"]) == ("given_up", 6, 5, 1000.5)
    assert told["reason"] == part.reason
    assert as_dict("r:1", state, [], UnavailableError("nobody answers"))["problem"] == "nobody answers"
    assert (as_dict("r:1", None, [])["parts"], as_dict("r:1", None, [])["problem"]) == ([], None)


def test_the_table_of_parts_says_what_became_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    """In words, with ages in their largest unit."""
    parts = [
        PartState(
            name="router",
            kind="router",
            phase="serving",
            life=2,
            since_unix_s=88.0,
            restarts=1,
            reason="killed",
        ),
        PartState(
            name="worker-0",
            kind="worker",
            phase="given_up",
            life=6,
            since_unix_s=-7200.0,
            reason="no\nmemory",
        ),
    ]
    print_parts(parts, 100.0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["router", "serving", "2", "1", "12", "s", "killed"] in lines
    assert any(line[:4] == ["worker-0", "given", "up", "6"] and line[5:7] == ["2", "h"] for line in lines)


def test_ages_are_told_in_their_largest_whole_unit() -> None:
    """A clock that was set back makes none negative."""
    assert [describe_age(seconds) for seconds in (-3, 0, 59.4, 60, 3600, 90_000, 864_000)] == [
        "0 s",
        "0 s",
        "59 s",
        "1 min",
        "1 h",
        "1 d",
        "10 d",
    ]


def test_what_is_left_is_told_in_two_units() -> None:
    """A pin that was put for two hours a moment ago is not said to end in one."""
    assert [describe_left(seconds) for seconds in (-3, 0.2, 60, 3600.5, 7199.9, 86_399, 90_000, 864_000)] == [
        "0 s",
        "1 s",
        "1 min",
        "1 h",
        "2 h",
        "23 h 59 min",
        "1 d 1 h",
        "10 d",
    ]
