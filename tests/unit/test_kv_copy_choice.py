"""The figures of copies: how fast they may go and do go, and when one is worth it."""

import pytest

from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.worker.kv_copies.choice import (
    BEGIN_MS,
    LEAST_PATIENCE_MS,
    MAX_SOURCES,
    Found,
    is_worth,
    order,
    patience_s,
)
from prefixmesh.worker.kv_copies.copier import PART_WAIT_S
from prefixmesh.worker.kv_copies.parts import PART_BYTES, PART_S, part_pages
from prefixmesh.worker.kv_copies.rate_bound import BURST_S, RateBound
from prefixmesh.worker.kv_copies.rates import GUESSED_BYTES_PER_S, LEAST_RATED_TOKENS, MOST_OFF, CopyRates
from prefixmesh.worker.read_prefix import MAX_READERS
from tests.support.kv_copying import LAYOUT
from tests.support.scripted_copies import Figures

OWN = Incarnation(1)


def stats_of(linear: float, quadratic: float = 0.0, load_back: float = 0.0) -> Figures:
    return Figures(linear, quadratic, load_back)


def source(address: str, tokens: int = 100, incarnation: int = 7) -> KvSource:
    return KvSource(address=address, incarnation=Incarnation(incarnation), tokens=tokens)


def test_what_is_sent_keeps_to_the_rate_whatever_its_size() -> None:
    """A quiet time leaves a tenth of a second's worth; what is larger is paid for afterwards."""
    bound, now, sent = RateBound(1000.0), 50.0, 0
    for size in (300, 5, 2000, 100, 100, 0, 700):
        wait_s = bound.take(size, now)
        now += wait_s
        sent += size
        assert sent <= 1000.0 * (now - 50.0 + BURST_S) + 1e-6
    assert now - 50.0 == pytest.approx((sent - 1000.0 * BURST_S) / 1000.0)
    assert bound.take(99, now + 10.0) == 0.0


def test_no_rate_is_no_bound() -> None:
    assert RateBound(0.0).take(10**12, 0.0) == 0.0


def test_what_is_not_sent_after_all_is_left_to_others() -> None:
    """Readers that give up while they wait do not take the rate from those who stay."""
    bound = RateBound(1000.0)
    for _ in range(5):
        assert bound.take(5000, 50.0) == pytest.approx(4.9)
        bound.give_back(5000)
    bound.give_back(5000)
    assert bound.take(300, 50.0) == pytest.approx(0.2)


def test_a_part_takes_a_second_of_a_bounded_rate_at_most_so_that_all_who_read_get_theirs_in_time() -> None:
    """All streams that may be open wait less for a part than a reader does."""
    for rate in (1.0, 1e6, 3e6, 1e9):
        size = part_pages(LAYOUT, rate) * LAYOUT.page_bytes
        assert LAYOUT.page_bytes <= size <= max(LAYOUT.page_bytes, min(rate * PART_S, PART_BYTES))
        assert size * 2 > min(rate, PART_BYTES) or size == LAYOUT.page_bytes
    assert part_pages(LAYOUT) * LAYOUT.page_bytes == PART_BYTES
    assert MAX_READERS * PART_S < PART_WAIT_S


def test_before_a_copy_was_measured_a_rate_is_guessed_by_the_bytes_and_then_learned() -> None:
    rates = CopyRates(1e3)
    assert rates.ms_per_token == pytest.approx(1e6 / GUESSED_BYTES_PER_S)
    rates.record(LEAST_RATED_TOKENS - 1, 1e6)
    rates.record(1000, 0.0)
    assert rates.ms_per_token == pytest.approx(1e6 / GUESSED_BYTES_PER_S)
    rates.record(1000, 200.0)
    assert rates.ms_per_token == pytest.approx(0.2)
    rates.record(1000, 1e9)
    assert 0.2 < rates.ms_per_token <= 0.2 * MOST_OFF
    for _ in range(60):
        rates.record(1000, 50.0)
    assert rates.ms_per_token == pytest.approx(0.05, rel=0.01)


def test_a_copy_is_worth_it_where_the_whole_of_it_is_quicker_than_to_do_without() -> None:
    slow, quick = stats_of(1.0).last, stats_of(0.01).last
    assert is_worth(Found(0, 0), 1000, 0.1, slow)
    assert not is_worth(Found(0, 0), 1000, 0.1, quick)
    assert not is_worth(Found(1000, 0), 1000, 0.0, slow)
    assert not is_worth(Found(400, 600), 1000, 0.0, slow)
    just = BEGIN_MS + 100 * 0.1
    assert is_worth(Found(900, 0), 1000, 0.1, stats_of((just + 0.01) / 100).last)
    assert not is_worth(Found(900, 0), 1000, 0.1, stats_of((just - 0.01) / 100).last)


def test_what_the_host_has_is_copied_too_and_would_be_loaded_back_without() -> None:
    costly, cheap = stats_of(0.01, load_back=1.0).last, stats_of(0.01).last
    assert is_worth(Found(0, 900), 1000, 0.1, costly)
    assert not is_worth(Found(0, 900), 1000, 0.1, cheap)


def test_long_prompts_cost_more_to_compute_by_the_curve() -> None:
    assert is_worth(Found(0, 0), 1000, 0.1, stats_of(0.0, quadratic=0.001).last)
    assert patience_s(Found(100, 0), 1000, stats_of(1.0, quadratic=0.01).last) == pytest.approx(
        (900 + 0.01 * (1000**2 - 100**2)) / 1e3
    )


def test_where_nothing_was_measured_the_router_is_believed() -> None:
    assert is_worth(Found(0, 0), 10, 1e9, None)
    assert is_worth(Found(0, 0), 10, 1e9, stats_of(0.0).last)
    assert patience_s(Found(0, 0), 10, None) == LEAST_PATIENCE_MS / 1e3


def test_sources_that_cannot_be_asked_are_left_out_and_the_order_stays() -> None:
    named = [
        source("a:1"),
        source("b:1", incarnation=OWN),
        source("c:1", tokens=0),
        source("not an address"),
        source("unix:/tmp/socket"),
        source("a:1", tokens=5),
        source("[::1]:9"),
        *(source(f"x{number}:1") for number in range(MAX_SOURCES)),
    ]
    told = [one.address for one in order(named, OWN)]
    assert told == ["a:1", "[::1]:9", "x0:1", "x1:1"][:MAX_SOURCES]
