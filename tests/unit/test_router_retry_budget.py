"""The retry budget: how many at once, how many after refusals over time, and who goes on when a place is left."""

import pytest

from prefixmesh.errors import DoubleReleaseError
from prefixmesh.router.retry_budget import EARNED_IN_S, LEAST_RETRIES, MOST_SAVED, RetryBudget

NOW = 1000.0


def budget_with(active: int) -> RetryBudget:
    budget = RetryBudget()
    for _ in range(active):
        budget.began()
    return budget


@pytest.mark.parametrize(("active", "places"), [(1, LEAST_RETRIES), (15, 3), (20, 4), (100, 20)])
def test_places_are_a_fifth_of_the_active_requests_and_a_few_at_least(active: int, places: int) -> None:
    budget = budget_with(active)
    taken = [budget.take_place() for _ in range(places + 2)]
    assert [place is not None for place in taken] == [True] * places + [False, False]


def test_who_waits_is_told_in_order_once_a_place_is_left() -> None:
    budget, told = budget_with(1), list[int]()
    held = [budget.take_place() for _ in range(LEAST_RETRIES)]
    waiting = [budget.await_place(lambda n=n: told.append(n)) for n in range(3)]  # type: ignore[misc]
    assert not told
    for place in held:
        assert place is not None
        place.leave()
    assert told == [0, 1, 2]
    assert all(place.is_held for place in waiting)


def test_nobody_overtakes_those_who_wait() -> None:
    budget = budget_with(1)
    held = [budget.take_place() for _ in range(LEAST_RETRIES)]
    first, second = budget.await_place(bool), budget.await_place(bool)
    assert held[0] is not None
    held[0].leave()
    assert (first.is_held, second.is_held) == (True, False)
    assert budget.take_place() is None


def test_who_waits_no_longer_is_passed_over() -> None:
    budget = budget_with(1)
    held = [budget.take_place() for _ in range(LEAST_RETRIES)]
    first, second = budget.await_place(bool), budget.await_place(bool)
    first.leave()
    assert held[0] is not None
    held[0].leave()
    assert (first.is_held, second.is_held) == (False, True)


def test_more_requests_make_more_places_for_those_who_wait() -> None:
    budget = budget_with(19)
    for _ in range(LEAST_RETRIES):
        budget.take_place()
    waiting = budget.await_place(bool)
    assert not waiting.is_held
    budget.began()
    assert waiting.is_held


def test_a_place_is_left_once_and_a_request_ends_once() -> None:
    budget = budget_with(1)
    place = budget.take_place()
    assert place is not None
    place.leave()
    with pytest.raises(DoubleReleaseError):
        place.leave()
    budget.ended()
    with pytest.raises(DoubleReleaseError):
        budget.ended()


def test_every_request_pays_for_some_of_a_retry_after_a_refusal() -> None:
    budget = budget_with(100)
    assert sum(budget.may_retry_refused(NOW) for _ in range(50)) == LEAST_RETRIES + 15
    for _ in range(7):
        budget.began()
    assert [budget.may_retry_refused(NOW) for _ in range(2)] == [True, False]


def test_what_is_saved_up_has_a_limit_and_time_alone_earns_only_a_few() -> None:
    budget = budget_with(10_000)
    assert sum(budget.may_retry_refused(NOW) for _ in range(1000)) == MOST_SAVED
    assert not budget.may_retry_refused(NOW + EARNED_IN_S / 100)
    assert sum(budget.may_retry_refused(NOW + 2 * EARNED_IN_S) for _ in range(50)) == LEAST_RETRIES
    assert sum(budget.may_retry_refused(NOW + 1000 * EARNED_IN_S) for _ in range(50)) == LEAST_RETRIES


@pytest.mark.parametrize("well_before", [0, 5000])
def test_a_steady_stream_of_refused_requests_is_multiplied_by_at_most_a_fifth(well_before: int) -> None:
    """F69, its arithmetic: 100 requests a second for 20 s, all refused, whatever was asked before."""
    budget, retries, requests = budget_with(well_before), 0, 2000
    for n in range(requests):
        budget.began()
        retries += budget.may_retry_refused(NOW + n / 100)
    assert requests * 0.1 < retries <= requests * 0.2
