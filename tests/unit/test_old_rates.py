"""What a worker measured long ago: whose excess fades, how fast, and that a trial costs one request."""

import numpy as np
import pytest

from prefixmesh.router.old_rates import (
    COMPARED_TOKENS,
    HALF_LIFE_S,
    HALF_LIFE_TURNS,
    LEAST_EXCESS,
    LEAST_MS,
    OldRates,
)
from tests.support.column_fleet import PREFILL_MS, ColumnFleet, Worker, column_fleet

SLOW = Worker(linear=10 * PREFILL_MS)
EQUAL = Worker()
BUSY_TURNS = 10_000
"""Requests enough that time alone decides."""


def aged(fleet: ColumnFleet, seconds: float, decisions: int = BUSY_TURNS) -> OldRates:
    """Everybody has rated itself once, so long and so many requests ago."""
    old = OldRates()
    for row in range(fleet.columns.rows):
        old.told(row, 1, now=100.0)
    old.decisions += decisions
    old.review(fleet.columns, 100.0 + seconds)
    return old


def linear(fleet: ColumnFleet, row: int = 0) -> float:
    return float(fleet.columns.rates.linear[row])


def test_half_of_an_excess_is_forgotten_in_a_half_life() -> None:
    fleet = column_fleet([SLOW, EQUAL, EQUAL])
    aged(fleet, HALF_LIFE_S)
    assert linear(fleet) == pytest.approx(5.5 * PREFILL_MS)
    assert linear(fleet, 1) == PREFILL_MS
    assert fleet.takers(500) == {1, 2}


def test_who_has_been_idle_for_long_is_tried_and_measured_by_what_it_told_from_then_on() -> None:
    """Its request arrives: all of what it measured counts again, before the next decision."""
    fleet = column_fleet([SLOW, Worker(in_flight=1)])
    old = aged(fleet, 20 * HALF_LIFE_S)
    assert fleet.takers(500) == {0}
    fleet.columns.set_load(0, in_flight=1, waiting_prefill_ms=250.0, decode_work_ms=0.0)
    assert linear(fleet) == 10 * PREFILL_MS
    assert fleet.takers(500) == {1}
    old.review(fleet.columns, 1e6)
    assert linear(fleet) == 10 * PREFILL_MS, "nothing fades of who has work"
    old.told(0, 2, now=1e6)
    fleet.columns.set_load(0, in_flight=0, waiting_prefill_ms=0.0, decode_work_ms=0.0)
    old.review(fleet.columns, 1e6)
    assert linear(fleet) == pytest.approx(10 * PREFILL_MS), "it has measured anew"


def after_a_request(seconds: float) -> float:
    """What half a life counts of a slow worker that was sent a request after so long, and has rated nothing by it."""
    fleet = column_fleet([SLOW, EQUAL])
    old = aged(fleet, seconds)
    old.routed(0)
    fleet.columns.set_load(0, in_flight=1, waiting_prefill_ms=0.0, decode_work_ms=0.0)
    fleet.columns.set_load(0, in_flight=0, waiting_prefill_ms=0.0, decode_work_ms=0.0)
    old.review(fleet.columns, 100.0 + seconds)
    old.decisions += BUSY_TURNS
    old.review(fleet.columns, 100.0 + seconds + HALF_LIFE_S)
    return linear(fleet) / PREFILL_MS


def test_trial_by_which_nothing_was_rated_is_one_all_the_same() -> None:
    """What was to be computed was too short: the worker is left alone for as long again, and not taken for quick whenever it is idle."""
    assert after_a_request(20 * HALF_LIFE_S) == pytest.approx(5.5)


def test_request_that_came_before_it_was_forgiven_is_no_trial() -> None:
    """As one that goes on from what the worker holds: it fades on, until something that is new has come."""
    assert after_a_request(2 * HALF_LIFE_S) == pytest.approx(1.0 + 9.0 / 8.0)


def test_trial_of_the_row_of_another_worker_is_forgotten_with_it() -> None:
    fleet = column_fleet([SLOW, EQUAL])
    old = aged(fleet, 20 * HALF_LIFE_S)
    old.routed(0)
    old.forget(0)
    old.told(0, 7, now=0.0)
    old.decisions += BUSY_TURNS
    old.review(fleet.columns, 1e6)
    assert linear(fleet) == pytest.approx(PREFILL_MS), "long ago"


def test_where_few_requests_come_few_trials_are_made() -> None:
    """An hour's silence, and one request in it: what is slow is not tried for that."""
    fleet = column_fleet([SLOW, EQUAL, EQUAL, EQUAL])
    aged(fleet, 3600.0, decisions=1)
    assert linear(fleet) > 8 * PREFILL_MS
    fleet = column_fleet([SLOW, EQUAL, EQUAL, EQUAL])
    aged(fleet, 3600.0, decisions=int(HALF_LIFE_TURNS * 4))
    assert linear(fleet) == pytest.approx(5.5 * PREFILL_MS)


def test_of_two_that_were_slow_the_quicker_comes_back_first_and_then_the_other() -> None:
    slower = Worker(linear=12 * PREFILL_MS)
    fleet = column_fleet([slower, SLOW, EQUAL])
    aged(fleet, 20 * HALF_LIFE_S)
    assert linear(fleet, 1) == pytest.approx(PREFILL_MS, rel=0.01)
    assert linear(fleet, 0) == pytest.approx(5.5 * PREFILL_MS, rel=0.01)


def test_a_new_measurement_takes_the_place_of_what_faded() -> None:
    fleet = column_fleet([SLOW, EQUAL])
    aged(fleet, 2 * HALF_LIFE_S)
    fleet.columns.set_rates(
        0,
        prefill_ms_per_token=3 * PREFILL_MS,
        prefill_ms_per_token2=0.0,
        decode_step_ms=30.0,
        load_back_ms_per_token=0.0,
        adapter_load_ms=0.0,
    )
    assert linear(fleet) == 3 * PREFILL_MS


@pytest.mark.parametrize(
    "workers",
    [
        [Worker(linear=(1.0 + 0.9 * LEAST_EXCESS) * PREFILL_MS), EQUAL],
        [Worker(linear=10 * PREFILL_MS, usable=False), EQUAL],
        [Worker(linear=10 * PREFILL_MS, in_flight=1), EQUAL],
        [SLOW],
    ],
    ids=["it wobbles", "it is not used", "it has work", "nobody else"],
)
def test_whose_rates_stay_as_they_are(workers: list[Worker]) -> None:
    fleet = column_fleet(workers)
    aged(fleet, 3600.0)
    assert linear(fleet) == workers[0].linear


def test_who_does_not_tell_when_it_measured_and_who_begins_anew_do_not_fade() -> None:
    fleet = column_fleet([SLOW, EQUAL])
    old = OldRates()
    old.told(1, 1, now=0.0)
    old.told(0, 0, now=0.0)
    old.decisions = BUSY_TURNS
    old.review(fleet.columns, 1e6)
    assert linear(fleet) == SLOW.linear
    old.told(0, 1, now=0.0)
    old.forget(0)
    old.review(fleet.columns, 1e6)
    assert linear(fleet) == SLOW.linear


def test_bend_and_decode_step_fade_with_the_straight_part() -> None:
    bent = Worker(linear=10 * PREFILL_MS, quadratic=1e-3, decode_step=300.0)
    fleet = column_fleet([bent, Worker(quadratic=1e-4)])
    aged(fleet, 20 * HALF_LIFE_S)
    rates = fleet.columns.rates
    assert [float(rates.quadratic[0]), float(rates.decode_step[0])] == pytest.approx([1e-4, 30.0], rel=0.01)


@pytest.mark.parametrize("told", [5e-324, 1e-300, LEAST_MS / COMPARED_TOKENS])
def test_rate_that_nothing_ever_had_leaves_the_others_numbers(told: float) -> None:
    """One lies that it takes next to nothing; the excess of the others, and what is left of it, are numbers all the same."""
    fleet = column_fleet([Worker(linear=told), Worker(linear=1e9, quadratic=1e9), SLOW])
    for seconds in (HALF_LIFE_S, 1e9):
        aged(fleet, seconds)
        assert np.isfinite(fleet.columns.rates.linear).all()
        assert linear(fleet, 2) > 0.0
