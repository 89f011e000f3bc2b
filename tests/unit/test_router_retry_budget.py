"""The retry budget: how many at once, how many after refusals over time, and who goes on when a place is left."""

import pytest

from prefixmesh.errors import DoubleReleaseError
from prefixmesh.router.retry_budget import LEAST_RETRIES, WINDOW_S, RetryBudget

NOW = 1000.0


def budget_with(active: int) -> RetryBudget:
    budget = RetryBudget()
    for _ in range(active):
        budget.began(NOW)
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
    budget.began(NOW)
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


def test_retries_after_refusals_are_a_fifth_of_what_was_asked_lately() -> None:
    budget = budget_with(100)
    assert sum(budget.may_retry_refused(NOW) for _ in range(50)) == 20
    assert not budget.may_retry_refused(NOW + WINDOW_S / 2)


def test_what_was_refused_long_ago_counts_no_more_and_neither_does_what_was_asked() -> None:
    budget = budget_with(100)
    while budget.may_retry_refused(NOW):
        pass
    later = NOW + WINDOW_S + 1.0
    assert sum(budget.may_retry_refused(later) for _ in range(50)) == LEAST_RETRIES
    assert sum(budget.may_retry_refused(later + 1000 * WINDOW_S) for _ in range(50)) == LEAST_RETRIES


def test_a_steady_stream_of_refused_requests_is_multiplied_by_at_most_a_fifth() -> None:
    """F69, its arithmetic: 100 requests a second for 20 s, all refused."""
    budget, retries, requests = RetryBudget(), 0, 2000
    for n in range(requests):
        budget.began(NOW + n / 100)
        retries += budget.may_retry_refused(NOW + n / 100)
    assert requests * 0.15 < retries <= requests * 0.2
