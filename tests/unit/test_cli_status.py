"""What ``prefixmesh status`` says of a worker's cache."""

import json

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.cli.status import as_dict, hit_share
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
        "hit_tokens": {"device": 10, "host": 5},
        "miss_tokens": {"never_seen": 11, "evicted": 7, "other_namespace": 4, "tail": 3},
        "cache_hit_rate": 0.375,
    }
    idle = shown(WorkerView(cache=encode_cache_counts(NOTHING)))
    assert isinstance(idle, dict)
    assert idle["cache_hit_rate"] is None


def test_the_table_shows_the_workers_own_rate() -> None:
    """All its callers count, not only this router's; of a worker that does not tell, the router's own figures are shown."""

    def view(row: LedgerRow | None) -> WorkerView:
        counts = None if row is None else encode_cache_counts(row)
        return WorkerView(prompt_tokens=100, cached_tokens=90, cache=counts)

    assert [hit_share(view(row)) for row in (ROW, NOTHING, None)] == ["38%", "-", "90%"]
    assert hit_share(WorkerView()) == "-"
    assert shown(view(None)) is None
