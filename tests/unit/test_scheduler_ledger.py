"""What the scheduler counts: each request once, at its first admission, with the causes that held before it changed the cache."""

import pytest

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.ids import Namespace
from prefixmesh.worker.request import Phase
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, Bench

BLOCKS_OF_2 = RadixOptions(block_size=2)
PROMPT = [1, 2, 3, 4, 5, 6]


def counted(bench: Bench) -> LedgerRow:
    return bench.scheduler.ledger.totals()


def test_a_preempted_and_resumed_request_counts_once() -> None:
    """Four answers in a pool for two: what a resumption finds of its own KV is no hit, and its prompt is not asked for again."""
    bench = Bench(total_pages=24, decode_room=0)
    for i in range(4):
        bench.submit(f"r{i}", [i, i, i], max_tokens=12)
    preempted = 0
    while bench.scheduler.has_work:
        before = list(bench.scheduler.running)
        bench.step()
        preempted += sum(request.phase is Phase.PREEMPTED for request in before)
    assert preempted, "the test must preempt to mean anything"
    assert counted(bench) == LedgerRow(4, 12, Hits(), Misses(never_seen=8, tail=4))
    assert bench.scheduler.ledger.ignored_records == 0


def test_who_waits_is_counted_when_admitted_and_who_leaves_the_queue_is_not() -> None:
    """Every step looks into the cache for those who wait; that is no query."""
    bench = Bench(max_running=1)
    for name in ("first", "waits", "leaves"):
        bench.submit(name, [1, 2, 3], max_tokens=4)
    bench.step()
    bench.step()
    assert counted(bench).requests == 1
    bench.abort("leaves")
    bench.run()
    assert counted(bench) == LedgerRow(2, 6, Hits(device=2), Misses(never_seen=2, tail=2))


def test_each_namespace_has_its_row() -> None:
    """The caller's own, whoever else has sent the same."""
    bench = Bench(options=BLOCKS_OF_2)
    for name, namespace in (("cold", NAMESPACE_A), ("warm", NAMESPACE_A), ("other", NAMESPACE_B)):
        bench.submit(name, PROMPT, max_tokens=0, namespace=namespace)
        bench.run()
    ledger = bench.scheduler.ledger
    assert ledger.row(Namespace(NAMESPACE_A)) == LedgerRow(
        2, 12, Hits(device=5), Misses(never_seen=5, tail=2)
    )
    assert ledger.row(Namespace(NAMESPACE_B)) == LedgerRow(1, 6, Hits(), Misses(other_namespace=5, tail=1))


def test_causes_are_told_before_the_request_evicts_them_itself() -> None:
    """The other namespace's KV goes to make room for this very request: it was there when the request asked."""
    bench = Bench(total_pages=8, options=BLOCKS_OF_2)
    bench.submit("theirs", PROMPT, max_tokens=0, namespace=NAMESPACE_B)
    bench.run()
    bench.submit("mine", PROMPT, max_tokens=0)
    bench.run()
    row = bench.scheduler.ledger.row(Namespace(NAMESPACE_A))
    assert row is not None
    assert row.miss_tokens == Misses(other_namespace=5, tail=1)


def test_what_was_evicted_is_told_apart_from_what_was_never_seen() -> None:
    """A match that ends inside a block names the block it lies in: two tokens are left, the four behind them were evicted."""
    bench = Bench(total_pages=8, options=BLOCKS_OF_2)
    bench.submit("cold", [*PROMPT, 7], max_tokens=0)
    bench.run()
    bench.cache.evict(5)
    bench.submit("again", [*PROMPT, 9], max_tokens=0)
    bench.run()
    row = counted(bench)
    assert row.hit_tokens == Hits(device=2)
    assert row.miss_tokens == Misses(never_seen=6, evicted=4, tail=2)


@pytest.mark.parametrize(("kind", "found"), [("hash", 16), ("off", 0)])
def test_other_caches_tell_hits_and_no_causes(kind: str, found: int) -> None:
    """They remember nothing of what they gave up."""
    bench = Bench(kind=kind)  # type: ignore[arg-type]
    for name in ("cold", "warm"):
        bench.submit(name, list(range(20)), max_tokens=0)
        bench.run()
    missed = 38 - found
    assert counted(bench) == LedgerRow(2, 40, Hits(device=found), Misses(never_seen=missed, tail=2))


def test_a_request_that_found_no_room_has_asked_for_nothing() -> None:
    """It matched, was explained, and got no pages."""
    bench = Bench(total_pages=8, options=RadixOptions(quotas={"a": Quota(floor_pages=8)}))
    bench.submit("a", PROMPT, max_tokens=0, owner="a")
    bench.run()
    bench.submit("b", [*PROMPT, 7, 8], max_tokens=0, owner="b", namespace=NAMESPACE_B)
    bench.run()
    assert bench.ended("b").reason == "no_room"
    assert counted(bench).requests == 1
