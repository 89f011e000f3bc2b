"""The oracle against a naive reading of its definition."""

from hypothesis import given
from hypothesis import strategies as st

from prefixmesh.demo.oracle import TenantOracle, Verdict

IDS = st.lists(st.integers(0, 2), max_size=8)


def test_the_first_prompt_can_find_nothing() -> None:
    """Whatever it finds all the same is somebody else's."""
    assert TenantOracle().judge([1, 2, 3], cached=0) == Verdict(possible=0, leaked=0)
    assert TenantOracle().judge([1, 2, 3], cached=2) == Verdict(possible=0, leaked=2)


def test_the_answer_counts_and_the_last_prompt_token_does_not() -> None:
    """The next turn finds the last turn's answer; one token is always computed."""
    oracle = TenantOracle()
    oracle.remember([1, 2, 3], [4, 5])
    assert oracle.judge([1, 2, 3, 4, 5, 6, 7], cached=5) == Verdict(possible=5, leaked=0)
    assert oracle.judge([1, 2, 3], cached=2) == Verdict(possible=2, leaked=0)


def test_another_tenants_tokens_are_a_leak_as_far_as_they_are_not_ones_own() -> None:
    """Only what goes beyond the common beginning counts."""
    mine, theirs = TenantOracle(), TenantOracle()
    mine.remember([1, 2, 9], [])
    theirs.remember([1, 2, 3, 4, 5], [])
    assert mine.judge([1, 2, 3, 4, 5, 6], cached=5) == Verdict(possible=2, leaked=3)


@given(st.lists(st.tuples(IDS, IDS), max_size=4), IDS, st.integers(0, 8))
def test_agrees_with_a_naive_search(
    history: list[tuple[list[int], list[int]]], prompt: list[int], cached: int
) -> None:
    """The longest beginning of the prompt that also begins some earlier prompt and answer."""
    oracle = TenantOracle()
    for earlier, answer in history:
        oracle.remember(earlier, answer)
    known = max(
        (
            n
            for n in range(len(prompt) + 1)
            for p, a in history
            if (p + a)[:n] == prompt[:n] and len(p + a) >= n
        ),
        default=0,
    )
    assert oracle.judge(prompt, cached) == Verdict(
        possible=min(known, max(0, len(prompt) - 1)), leaked=max(0, cached - known)
    )
