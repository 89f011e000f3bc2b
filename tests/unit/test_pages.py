"""The page allocator: all or nothing, and no page given to two owners."""

from collections.abc import Callable

import numpy as np
import pytest

from prefixmesh.cache.pages import PageAllocator
from prefixmesh.errors import ConfigError, InternalError, InvariantError
from tests.support.cache_kit import as_pages, take


def test_gives_each_page_once_and_then_none() -> None:
    """Every page of the pool is given to one owner; when too few are free, nothing is given at all."""
    allocator = PageAllocator(5)
    first, second = take(allocator, 2), take(allocator, 2)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    assert allocator.allocate(2) is None
    assert allocator.free_pages == 1
    assert allocator.allocate(1) is not None
    assert allocator.free_pages == 0
    assert allocator.total_pages == 5


def test_gives_pages_in_ascending_order_also_after_they_came_back() -> None:
    """Last freed first, and in the order in which they came: neighbours in the pool stay neighbours."""
    allocator = PageAllocator(8)
    pages = take(allocator, 4)
    assert pages.tolist() == [0, 1, 2, 3]
    assert pages.dtype == np.int32
    allocator.free(pages)
    again = take(allocator, 4)
    assert again.tolist() == [0, 1, 2, 3]


def test_given_indices_are_the_callers_own_array() -> None:
    """F36: what is given keeps alive only itself, and writing to it does not change the pool."""
    allocator = PageAllocator(1000)
    pages = take(allocator, 3)
    assert pages.base is None
    pages[:] = 7
    allocator.check_invariants()


def test_nothing_is_allocated_and_freed_as_nothing() -> None:
    """Zero pages are a valid number of pages, also of an empty pool."""
    allocator = PageAllocator(1)
    allocator.allocate(1)
    nothing = take(allocator, 0)
    assert len(nothing) == 0
    allocator.free(nothing)
    assert allocator.free_pages == 0


@pytest.mark.parametrize(
    "pages",
    [[0], [1, 0], [1, 1], [2, 1, 2], [-1], [4], [1, 2, 3, 1], [-3]],
    ids=[
        "free",
        "one_free",
        "twice",
        "twice_apart",
        "negative",
        "too_large",
        "too_many",
        "negative_of_an_owned_page",
    ],
)
def test_refuses_pages_that_are_not_out_and_frees_none_of_them(pages: list[int]) -> None:
    """A page that is free, named twice or unknown raises, and everything stays as it was."""
    allocator = PageAllocator(4)
    take(allocator, 4)
    allocator.free(as_pages([0]))
    with pytest.raises(InternalError):
        allocator.free(as_pages(pages))
    allocator.check_invariants({"test": as_pages([1, 2, 3])})
    allocator.free(as_pages([1, 2, 3]))
    allocator.check_invariants({})


def test_refuses_impossible_sizes() -> None:
    """A pool has pages, and nobody wants fewer than none."""
    with pytest.raises(ConfigError):
        PageAllocator(0)
    with pytest.raises(InternalError):
        PageAllocator(3).allocate(-1)


def test_check_finds_a_page_without_an_owner_and_a_page_with_two() -> None:
    """Owners and free pages together are the pool, each page exactly once."""
    allocator = PageAllocator(4)
    allocator.allocate(3)
    allocator.check_invariants({"request": as_pages([0, 1]), "node": as_pages([2])})
    with pytest.raises(InvariantError, match=r"owned by nobody \[2\]"):
        allocator.check_invariants({"request": as_pages([0, 1])})
    with pytest.raises(InvariantError, match=r"by several \[1\]"):
        allocator.check_invariants({"request": as_pages([0, 1]), "node": as_pages([1, 2])})
    with pytest.raises(InvariantError, match=r"by several \[3\]"):
        allocator.check_invariants({"request": as_pages([0, 1, 2, 3])})


def _lose_a_mark(allocator: PageAllocator) -> None:
    allocator._mark[3] = 0


def _swap_two_marks(allocator: PageAllocator) -> None:
    allocator._mark[[2, 3]] = allocator._mark[[3, 2]]


@pytest.mark.parametrize("corrupt", [_lose_a_mark, _swap_two_marks])
def test_check_finds_marks_that_disagree_with_the_stack(corrupt: Callable[[PageAllocator], None]) -> None:
    """The stack and the marks say the same twice; the check compares them."""
    allocator = PageAllocator(4)
    corrupt(allocator)
    with pytest.raises(InvariantError, match="pages"):
        allocator.check_invariants()


def test_random_owners_never_share_a_page() -> None:
    """Seeded: 2,000 allocations and frees, compared with plain sets."""
    rng = np.random.default_rng(5)
    allocator = PageAllocator(50)
    held: list[set[int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            back = held.pop(int(rng.integers(len(held))))
            allocator.free(as_pages(sorted(back)))
        else:
            n = int(rng.integers(0, 12))
            pages = allocator.allocate(n)
            out = sum(map(len, held))
            assert (pages is None) == (n > 50 - out)
            if pages is not None:
                assert len(set(pages.tolist())) == n
                held.append(set(pages.tolist()))
        assert allocator.free_pages == 50 - sum(map(len, held))
        allocator.check_invariants({str(i): as_pages(sorted(one)) for i, one in enumerate(held)})


def test_repr_is_a_summary() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    assert repr(allocator) == "PageAllocator(free=3/4)"


@pytest.mark.parametrize(
    "pages",
    [[1, 2, 3, 0, 4], [0, 1, 2, 3], [1, 2, 3, 1, 4], [1, 2, 3, 3], [1, 2, 3, 4, -1], [1, 2, 3, 10]],
    ids=["one_free", "the_first_free", "twice_apart", "twice", "negative_of_an_owned_page", "too_large"],
)
def test_refuses_many_pages_of_which_one_is_not_out_and_frees_none_of_them(pages: list[int]) -> None:
    """As with a few, which come back one by one."""
    allocator = PageAllocator(10)
    take(allocator, 10)
    allocator.free(as_pages([0]))
    with pytest.raises(InternalError):
        allocator.free(as_pages(pages))
    allocator.check_invariants({"test": as_pages(list(range(1, 10)))})
    allocator.free(as_pages(list(range(1, 10))))
    allocator.check_invariants({})
