"""What is expected of answers: exact on small histories, and better than a constant on long ones."""

import pytest

from prefixmesh.worker.output_estimate import (
    LEAST_CAUTION,
    MIN_AHEAD_TOKENS,
    MOST_CAUTION,
    TRUSTED_ENDS,
    WINDOW,
    OutputEstimate,
)


def learnt(lengths: list[int], *, by_itself: bool = True) -> OutputEstimate:
    estimate = OutputEstimate()
    for length in lengths:
        estimate.ended(length, by_itself=by_itself)
    return estimate


@pytest.mark.parametrize("constant_tokens", [None, 4])
def test_the_mean_is_of_the_last_answers_whatever_ended_them(constant_tokens: int | None) -> None:
    """How long a place is taken: an answer that its limit cut has given it back as well."""
    estimate = OutputEstimate(constant_tokens)
    assert estimate.mean_tokens == 0.0
    for length in (10, 30):
        estimate.ended(length, by_itself=length == 30)
    assert estimate.mean_tokens == 20.0
    for _ in range(WINDOW):
        estimate.ended(7, by_itself=True)
    assert estimate.mean_tokens == 7.0


def test_nothing_known_expects_half_of_what_may_come() -> None:
    assert OutputEstimate().total_tokens(0, 1000) == 500
    assert OutputEstimate().total_tokens(600, 1000) == 800


def test_it_expects_the_mean_of_the_last_answers_whatever_the_limit_is() -> None:
    """A limit far above what answers need keeps no room; one below is all that can come."""
    estimate = learnt([100, 200, 300, 400] * 4)
    assert estimate.total_tokens(0, 1000) == estimate.total_tokens(0, 100_000) == 250
    assert estimate.total_tokens(0, 200) == 175, "100 for a quarter, 200 for the others"


def test_an_answer_that_has_outlived_some_is_expected_to_end_with_the_others() -> None:
    """And one that has outlived all to become twice what it is."""
    estimate = learnt([100, 200, 300, 400] * 4)
    assert estimate.total_tokens(200, 1000) == 350
    assert estimate.total_tokens(399, 1000) == 399 + MIN_AHEAD_TOKENS
    assert estimate.total_tokens(400, 1000) == 800


def test_a_limit_that_cut_answers_does_not_make_them_look_short() -> None:
    """All were cut at 10: how long they would have become nobody knows, so a limit of 1,000 may be reached."""
    assert learnt([10] * 20, by_itself=False).total_tokens(0, 1000) == 1000
    mixed = OutputEstimate()
    for _ in range(8):
        mixed.ended(10, by_itself=False)
        mixed.ended(100, by_itself=True)
    assert mixed.total_tokens(0, 1000) == 100


def test_few_answers_are_believed_in_part() -> None:
    """A half after half of the trusted number."""
    assert learnt([100] * (TRUSTED_ENDS // 2)).total_tokens(0, 1000) == (500 + 100) // 2


def test_only_the_last_answers_count() -> None:
    assert learnt([1000] * WINDOW + [50] * WINDOW).total_tokens(0, 4000) == 50


@pytest.mark.parametrize("output", [0, 1, 99, 100, 101, 5000])
@pytest.mark.parametrize("limit", [1, 100, 4000])
def test_an_estimate_is_beyond_what_there_is_and_within_the_limit(output: int, limit: int) -> None:
    output = min(output, limit)
    expected = learnt([100, 3000] * 10).total_tokens(output, limit)
    assert min(limit, output + MIN_AHEAD_TOKENS) <= expected <= limit


def test_caution_falls_while_all_goes_well_and_rises_with_a_preemption() -> None:
    estimate = learnt([10] * 500)
    assert estimate.caution == LEAST_CAUTION
    before = estimate.caution
    estimate.preempted()
    assert before < estimate.caution < MOST_CAUTION
    for _ in range(50):
        estimate.preempted()
    assert estimate.caution == MOST_CAUTION


def test_a_constant_learns_nothing() -> None:
    estimate = OutputEstimate(32)
    for _ in range(50):
        estimate.ended(500, by_itself=True)
    estimate.preempted()
    assert (estimate.total_tokens(0, 1000), estimate.total_tokens(990, 1000)) == (32, 1000)
    assert estimate.caution == 1.0
