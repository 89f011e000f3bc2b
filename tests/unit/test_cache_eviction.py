"""Eviction: in which order, how much, and how far up."""

import pytest

from prefixmesh.cache.node import nodes_below
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from tests.support.cache_kit import insert_prompt, key_of


def make(page_size: int = 1, pages: int = 100) -> tuple[RadixCache, PageAllocator]:
    allocator = PageAllocator(pages)
    return RadixCache(allocator, page_size), allocator


def test_the_least_recently_used_leaf_goes_first() -> None:
    """A match is a use, and so is an insert; a peek is not."""
    cache, allocator = make()
    for token in (1, 2, 3):
        insert_prompt(cache, allocator, [token, token], now=0.0)
    cache.match_prefix(key_of([1, 1]), 1.0)
    cache.peek(key_of([2, 2]))
    insert_prompt(cache, allocator, [2, 2, 5], now=2.0)
    assert cache.evict(2) == 2
    assert [cache.peek(key_of([t, t])) for t in (1, 2, 3)] == [2, 2, 0]
    assert cache.evict(2) == 2
    assert [cache.peek(key_of([t, t])) for t in (1, 2, 3)] == [0, 2, 0]


def test_a_release_is_the_last_use_of_what_it_protected() -> None:
    """A prefix that a long answer read until just now outlives one that was matched meanwhile and never since."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 1])
    insert_prompt(cache, allocator, [2, 2])
    reader = cache.lock(cache.match_prefix(key_of([1, 1]), 1.0).last_device_node)
    cache.match_prefix(key_of([2, 2]), 2.0)
    cache.release(reader)
    cache.evict(2)
    assert (cache.peek(key_of([1, 1])), cache.peek(key_of([2, 2]))) == (2, 0)


def test_the_order_does_not_depend_on_the_clock() -> None:
    """Times that stand still or run backwards change nothing: the order is that of the calls."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1], now=100.0)
    insert_prompt(cache, allocator, [2], now=50.0)
    insert_prompt(cache, allocator, [3], now=50.0)
    for gone in (1, 2, 3):
        cache.evict(1)
        assert cache.peek(key_of([gone])) == 0
        cache.check_invariants()


def test_a_long_leaf_is_trimmed_from_its_end() -> None:
    """Never more than needed: what is left of the leaf still matches."""
    cache, allocator = make(page_size=2)
    pages = insert_prompt(cache, allocator, range(20)).device_indices
    assert cache.evict(3) == 3
    assert sorted(allocator.listing().tolist()[-3:]) == sorted(pages[7:].tolist())
    assert cache.peek(key_of(range(20))) == 14
    assert cache.evictable_pages == 7
    cache.check_invariants()
    assert cache.evict(7) == 7
    assert cache.node_count == 0


def test_a_trimmed_leaf_may_grow_again() -> None:
    """A prompt that comes back after a trim finds what is left and computes the rest only."""
    cache, allocator = make()
    insert_prompt(cache, allocator, range(10))
    cache.evict(4)
    assert insert_prompt(cache, allocator, range(10)).prefix_tokens == 6
    assert cache.peek(key_of(range(10))) == 10
    cache.check_invariants()


def test_eviction_cascades_to_a_parent_that_became_a_leaf() -> None:
    """Leaf, then parent, then grandparent, in one call, and the parent only in its own turn."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2])
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    insert_prompt(cache, allocator, [1, 2, 3, 4, 5, 6])
    insert_prompt(cache, allocator, [9, 9])
    assert cache.evict(5) == 5
    assert cache.peek(key_of([1, 2, 3, 4, 5, 6])) == 1
    assert cache.peek(key_of([9, 9])) == 2
    cache.check_invariants()


def test_a_parent_that_was_used_later_than_another_leaf_waits_its_turn() -> None:
    """What becomes a leaf stands where its own last use put it, not at the head of the line."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3])
    insert_prompt(cache, allocator, [8, 8])
    cache.match_prefix(key_of([1, 2]), 1.0)
    cache.evict(1)
    assert cache.peek(key_of([1, 2, 3])) == 2
    cache.evict(2)
    assert (cache.peek(key_of([1, 2])), cache.peek(key_of([8, 8]))) == (2, 0)


def test_locked_and_inner_nodes_stay() -> None:
    """Asked for everything, eviction leaves exactly the locked path; inner nodes go after their children."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3])
    insert_prompt(cache, allocator, [1, 2, 4])
    insert_prompt(cache, allocator, [5, 6])
    receipt = cache.lock(cache.match_prefix(key_of([1, 2, 4]), 1.0).last_device_node)
    assert cache.evict(100) == 3
    assert cache.peek(key_of([1, 2, 4])) == 3
    assert cache.evict(1) == 0
    cache.release(receipt)
    assert cache.evict(100) == 3
    assert (cache.node_count, allocator.free_pages) == (0, 100)


@pytest.mark.parametrize("pages", [0, -3])
def test_nothing_wanted_is_nothing_freed(pages: int) -> None:
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3])
    assert cache.evict(pages) == 0
    assert cache.evictable_pages == 3


def test_the_order_holds_exactly_the_unlocked_nodes_however_often_they_are_used() -> None:
    """Bounded: a million uses leave no stale entry behind (here a few thousand)."""
    cache, allocator = make()
    for token in range(5):
        insert_prompt(cache, allocator, [1, token, token])
    for turn in range(3000):
        match = cache.match_prefix(key_of([1, turn % 5, turn % 5]), float(turn))
        cache.release(cache.lock(match.last_device_node))
    assert (
        len(cache._accounts.lines.payer("").line)
        == cache.node_count
        == len(list(nodes_below(cache._accounts.root)))
    )
