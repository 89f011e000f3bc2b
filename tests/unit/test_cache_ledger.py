"""The ledger: counted once per request, only rising, and nothing lost when a row is folded (F71)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.ledger import CacheLedger, Hits, LedgerRow, Lookup, MissCause, Misses
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import ConfigError, InternalError, InvariantError
from prefixmesh.ids import Namespace
from tests.support.cache_kit import NS_A, NS_B

WARM = Lookup(100, 60, 20, Misses(never_seen=4, evicted=7, other_namespace=8, tail=1))
COLD = Lookup(50, 0, 0, Misses(never_seen=49, tail=1))
NAMESPACES = [Namespace(bytes([letter]) * 16) for letter in b"abcd"]

small = st.integers(0, 5)
lookups = st.tuples(*[small] * 7).map(
    lambda parts: Lookup(sum(parts), parts[0], parts[1], Misses(*parts[3:]), parts[2])
)


def flat(row: LedgerRow) -> tuple[int, ...]:
    return (row.requests, row.prompt_tokens, *row.hit_tokens, *row.miss_tokens)


def test_a_row_tells_hits_per_tier_and_misses_per_cause() -> None:
    """The parts are found by tier and by cause, and sum to what was asked for."""
    ledger = CacheLedger()
    assert ledger.open_query(NS_A).record(WARM)
    assert ledger.open_query(NS_A).record(COLD)
    row = ledger.row(NS_A)
    assert row == LedgerRow(2, 150, Hits(60, 20), Misses(53, 7, 8, 2))
    assert [row.hit_tokens[tier] for tier in Tier] == [60, 20]
    assert [row.miss_tokens[cause] for cause in MissCause] == [53, 7, 8, 2]
    assert ledger.rows() == {NS_A: row}
    assert ledger.totals() == row
    ledger.check_invariants()


def test_a_hit_rate_is_a_share_of_prompt_tokens() -> None:
    """Per tier and in all; with nothing asked for there is no rate."""
    ledger = CacheLedger()
    assert ledger.cache_hit_rate() is None
    assert ledger.cache_hit_rate(Tier.HOST) is None
    ledger.open_query(NS_A).record(WARM)
    assert ledger.cache_hit_rate() == 0.8
    assert ledger.cache_hit_rate(Tier.DEVICE) == 0.6
    assert ledger.cache_hit_rate(Tier.HOST) == 0.2


def test_what_came_from_the_disk_is_a_hit_of_its_own() -> None:
    """By then the device holds it; it is not counted twice, and the parts still sum to the prompt."""
    ledger = CacheLedger()
    fetched = Lookup(100, 20, 10, Misses(never_seen=29, tail=1), disk_tokens=40)
    assert ledger.open_query(NS_A).record(fetched)
    assert ledger.totals() == LedgerRow(1, 100, Hits(device=20, host=10, disk=40), Misses(29, 0, 0, 1))
    assert ledger.cache_hit_rate() == 0.7
    assert ledger.cache_hit_rate(Tier.DEVICE) == 0.2
    ledger.check_invariants()


def test_a_request_is_counted_once_however_often_it_is_admitted() -> None:
    """A resumed request finds its own KV: counting that would make pressure look like a good cache."""
    ledger = CacheLedger()
    query = ledger.open_query(NS_A)
    opened = query.is_open
    assert query.record(COLD)
    assert (opened, query.is_open) == (True, False)
    before = ledger.totals()
    for _ in range(3):
        assert not query.record(Lookup(53, 52, 0, Misses(tail=1)))
    assert ledger.totals() == before
    assert ledger.ignored_records == 3


def test_a_request_that_never_was_admitted_is_not_counted() -> None:
    """Nor does the ledger keep anything for it."""
    ledger = CacheLedger()
    ledger.open_query(NS_A)
    assert ledger.row(NS_A) is None
    assert ledger.totals().requests == 0


@pytest.mark.parametrize(
    "wrong",
    [
        COLD._replace(prompt_tokens=51),
        COLD._replace(device_tokens=1),
        Lookup(50, 51, 0, Misses(never_seen=-1)),
        Lookup(50, 51, -1, Misses()),
        COLD._replace(disk_tokens=1),
        Lookup(50, 51, 0, Misses(), -1),
    ],
)
def test_a_lookup_that_does_not_add_up_is_refused(wrong: Lookup) -> None:
    """Neither more found than asked for, nor anything negative; the query may still count."""
    ledger = CacheLedger()
    query = ledger.open_query(NS_A)
    with pytest.raises(InternalError):
        query.record(wrong)
    assert ledger.totals().requests == 0
    assert ledger.rows() == {}
    assert query.record(COLD)


def test_the_least_recently_used_row_is_folded_into_the_rest() -> None:
    """Totals lose nothing, and a namespace that comes back begins again."""
    ledger = CacheLedger(max_rows=2)
    a, b, c, _ = NAMESPACES
    for namespace in (a, b, a, c):
        ledger.open_query(namespace).record(WARM)
    assert list(ledger.rows()) == [a, c]
    assert ledger.row(b) is None
    assert ledger.rest() == LedgerRow(1, 100, Hits(60, 20), WARM.misses)
    ledger.open_query(b).record(COLD)
    assert ledger.row(b) == LedgerRow(1, 50, Hits(), COLD.misses)
    assert ledger.rest().requests == 3
    assert ledger.totals().requests == 5
    assert ledger.folded_rows == 2
    ledger.check_invariants()


def test_a_ledger_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError):
        CacheLedger(max_rows=0)


def test_the_summary_is_one_line() -> None:
    ledger = CacheLedger(max_rows=2)
    assert repr(ledger) == (
        "CacheLedger(requests=0, prompt_tokens=0, cache_hit_rate=none, rows=0/2, folded=0)"
    )
    query = ledger.open_query(NS_B)
    assert repr(query) == "CacheQuery(namespace=62626262, open)"
    query.record(WARM)
    assert repr(ledger) == (
        "CacheLedger(requests=1, prompt_tokens=100, cache_hit_rate=0.800, rows=1/2, folded=0)"
    )
    assert repr(query) == "CacheQuery(namespace=62626262, recorded)"


@pytest.mark.parametrize(
    ("damage", "group"),
    [
        (lambda ledger: setattr(ledger._rows[NS_A], "device", -1), "negative"),
        (lambda ledger: setattr(ledger._rows[NS_A], "prompt", 1), "sums"),
        (lambda ledger: ledger._rows.pop(NS_A), "totals"),
        (lambda ledger: setattr(ledger, "_max_rows", 0), "bound"),
    ],
)
def test_check_invariants_finds_what_is_broken(damage, group: str) -> None:  # type: ignore[no-untyped-def]
    """A check that cannot fail checks nothing."""
    ledger = CacheLedger()
    ledger.open_query(NS_A).record(WARM)
    damage(ledger)
    with pytest.raises(InvariantError, match=group):
        ledger.check_invariants()


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    max_rows=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(NAMESPACES), lookups, st.lists(lookups, max_size=2)), max_size=20
    ),
)
def test_counters_only_rise_and_nothing_counts_twice(
    max_rows: int, steps: list[tuple[Namespace, Lookup, list[Lookup]]]
) -> None:
    """F71, and that totals are what was recorded first by each request, whatever is recorded again or folded."""
    ledger = CacheLedger(max_rows)
    expected = [0] * 9
    for namespace, first, again in steps:
        rows, rest, totals = ledger.rows(), flat(ledger.rest()), flat(ledger.totals())
        query = ledger.open_query(namespace)
        query.record(first)
        for lookup in again:
            query.record(lookup)
        ledger.check_invariants()
        hits = Hits(first.device_tokens, first.host_tokens, first.disk_tokens)
        added = (1, first.prompt_tokens, *hits, *first.misses)
        expected = [had + new for had, new in zip(expected, added, strict=True)]
        assert flat(ledger.totals()) == tuple(expected)
        assert all(now >= was for now, was in zip(flat(ledger.totals()), totals, strict=True))
        assert all(now >= was for now, was in zip(flat(ledger.rest()), rest, strict=True))
        for name, row in ledger.rows().items():
            was = flat(rows[name]) if name in rows else (0,) * 9
            assert all(new >= old for new, old in zip(flat(row), was, strict=True))
            assert sum(row.hit_tokens) <= row.prompt_tokens
        everything = [flat(ledger.rest()), *map(flat, ledger.rows().values())]
        assert tuple(map(sum, zip(*everything, strict=True))) == flat(ledger.totals())
    assert ledger.ignored_records == sum(len(again) for _, _, again in steps)
