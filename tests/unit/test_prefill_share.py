"""How a step's prompt tokens are shared out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.prefill_share import share_out, would_get_on


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    """The long one keeps half."""
    assert share_out([4000, 100], 512) == [412, 100]
    assert share_out([4000, 300], 512) == [256, 256]
    assert share_out([4000, 300, 100], 512) == [256, 156, 100]


def test_a_short_first_leaves_the_rest_to_the_others() -> None:
    assert share_out([100, 4000, 4000], 512) == [100, 412, 0]


def test_nobody_is_admitted_who_would_get_nothing() -> None:
    """A second prompt as long as the first would only sit on pages; one that is shorter goes before it."""
    assert not would_get_on([4000], 4000, 512)
    assert would_get_on([4000], 3000, 512)
    assert would_get_on([4000, 3000], 10, 512)
    assert not would_get_on([4000], 1, 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(remaining=st.lists(st.integers(1, 50), max_size=8), budget=st.integers(1, 60))
def test_the_whole_budget_is_used_and_the_first_gets_its_half(remaining: list[int], budget: int) -> None:
    """And of the others nobody gets anything while one with less left is not done."""
    sizes = share_out(remaining, budget)
    assert sum(sizes) == min(budget, sum(remaining))
    assert all(0 <= size <= left for size, left in zip(sizes, remaining, strict=True))
    if not remaining:
        return
    assert sizes[0] >= min(remaining[0], (budget + 1) // 2)
    for one in range(1, len(remaining)):
        if sizes[one]:
            assert all(
                sizes[other] == remaining[other]
                for other in range(len(remaining))
                if remaining[other] < remaining[one]
            )
