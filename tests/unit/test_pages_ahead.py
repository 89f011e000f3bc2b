"""The most pages that a batch needs at once, against growing it page by page."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.pages_ahead import Growth, most_needed

GROWTHS = st.lists(st.builds(Growth, st.integers(0, 12), st.integers(0, 12)), max_size=6)


def test_answers_that_began_together_need_all_their_room_and_others_much_less() -> None:
    assert most_needed([Growth(10, 0)] * 4) == 40
    assert most_needed([Growth(0, 9), Growth(3, 6), Growth(6, 3), Growth(9, 0)]) == 0
    assert most_needed([]) == 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(growths=GROWTHS)
def test_it_is_the_highest_point_of_growing_page_by_page(growths: list[Growth]) -> None:
    """Everybody takes a page, those who have theirs end and give back all."""
    left, taken = {i: growth.pages for i, growth in enumerate(growths)}, dict.fromkeys(range(len(growths)), 0)
    now = most = 0
    while left:
        for i in [i for i, pages in left.items() if not pages]:
            now -= taken[i] + growths[i].gives_back
            del left[i]
        for i in left:
            left[i] -= 1
            taken[i] += 1
            now += 1
        most = max(most, now)
    assert most_needed(growths) == most
