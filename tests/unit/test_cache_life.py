"""The life of two requests, F37 and F41: whom a lock protects, for how long, and who goes when memory runs out."""

import pytest

from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.errors import DoubleReleaseError, InternalError
from tests.support.cache_kit import as_pages, insert_prompt, key_of, take

X, Y, Z = 101, 102, 103


def test_the_life_of_two_requests() -> None:
    """`X Y Z 1 2 3` and `X Y Z 4 5 6`: shared, split, counted, protected by locks, then by a child, then gone."""
    allocator = PageAllocator(9)
    cache = RadixCache(allocator, page_size=1)

    # The first arrives: nothing is cached. It computes six tokens and inserts them.
    first = cache.match_prefix(key_of([X, Y, Z, 1, 2, 3]), 1.0)
    assert first.matched_tokens == 0
    nothing = cache.lock(first.last_device_node)
    first_pages = take(allocator, 6)
    first_leaf = cache.insert(key_of([X, Y, Z, 1, 2, 3]), first_pages, 1.0).last_device_node
    first_receipt = cache.lock(first_leaf)
    cache.release(nothing)
    assert (first_leaf.lock_ref, cache.protected_pages, cache.evictable_pages) == (1, 6, 0)

    # The second arrives: three tokens are cached. The edge splits; the pages of X Y Z are where they were.
    second = cache.match_prefix(key_of([X, Y, Z, 4, 5, 6]), 2.0)
    assert second.matched_tokens == 3
    assert second.device_indices.tolist() == first_pages[:3].tolist()
    assert allocator.free_pages == 3
    shared_parent = second.last_device_node
    assert parent_of(first_leaf) is shared_parent
    second_prefix = cache.lock(shared_parent)
    assert (shared_parent.lock_ref, first_leaf.lock_ref) == (2, 1)

    # The first finishes while the second still prefills: only its leaf may go.
    cache.release(first_receipt)
    assert (shared_parent.lock_ref, first_leaf.lock_ref) == (1, 0)
    assert (cache.protected_pages, cache.evictable_pages) == (3, 3)
    cache.check_invariants()

    # The second has computed its own and inserts them.
    second_pages = as_pages([*second.device_indices, *take(allocator, 3)])
    second_leaf = cache.insert(key_of([X, Y, Z, 4, 5, 6]), second_pages, 3.0).last_device_node
    second_receipt = cache.lock(second_leaf)
    cache.release(second_prefix)
    assert (shared_parent.lock_ref, second_leaf.lock_ref) == (1, 1)

    # It finishes. The parent has no user now and is protected by its children alone.
    cache.release(second_receipt)
    assert (shared_parent.lock_ref, cache.protected_pages, cache.evictable_pages) == (0, 0, 9)
    assert allocator.free_pages == 0

    # Memory runs out: the first's leaf, the second's, the parent.
    assert cache.evict(3) == 3
    assert sorted(allocator.listing().tolist()) == sorted(first_pages[3:].tolist())
    assert cache.peek(key_of([X, Y, Z, 1])) == 3
    assert cache.peek(key_of([X, Y, Z, 4, 5, 6])) == 6
    assert cache.evict(3) == 3
    assert cache.peek(key_of([X, Y, Z, 4, 5, 6])) == 3
    assert cache.evict(3) == 3
    assert cache.peek(key_of([X, Y, Z])) == 0
    assert allocator.free_pages == 9
    cache.check_invariants()


def test_while_the_second_prefills_only_the_firsts_leaf_may_be_evicted() -> None:
    """Asked for everything, eviction stops at what the second request reads."""
    allocator = PageAllocator(6)
    cache = RadixCache(allocator, page_size=1)
    insert_prompt(cache, allocator, [X, Y, Z, 1, 2, 3])
    second = cache.match_prefix(key_of([X, Y, Z, 4, 5, 6]), 2.0)
    receipt = cache.lock(second.last_device_node)
    assert cache.evict(100) == 3
    assert cache.peek(key_of([X, Y, Z, 1, 2, 3])) == 3
    cache.release(receipt)
    assert cache.evict(100) == 3
    cache.check_invariants()


def test_a_shorter_insert_under_a_lock_leaves_no_count_behind() -> None:
    """F37: insert 0..99; match 0..49, lock; insert 0..49 and more; unlock: every lock count is 0."""
    allocator = PageAllocator(200)
    cache = RadixCache(allocator, page_size=1)
    insert_prompt(cache, allocator, range(100))
    match = cache.match_prefix(key_of(range(50)), 1.0)
    receipt = cache.lock(match.last_device_node)
    insert_prompt(cache, allocator, [*range(50), *range(500, 520)])
    insert_prompt(cache, allocator, [*range(25), 7])
    cache.release(receipt)
    cache.check_invariants()
    assert cache.protected_pages == 0
    assert all("lock_ref=0" in line for line in cache.render().splitlines())


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_receipt_releases_the_path_it_locked_after_any_split(cut: int) -> None:
    """Splitting a locked edge anywhere, twice, changes neither whom it protects nor what a release undoes."""
    allocator = PageAllocator(40)
    cache = RadixCache(allocator, page_size=1)
    end = insert_prompt(cache, allocator, range(8)).last_device_node
    receipt = cache.lock(end)
    insert_prompt(cache, allocator, [*range(cut), 99])
    insert_prompt(cache, allocator, [*range(cut // 2), 98])
    cache.check_invariants()
    assert cache.protected_pages == 8
    cache.evict(100)
    assert cache.peek(key_of(range(8))) == 8
    cache.release(receipt)
    assert cache.protected_pages == 0
    cache.check_invariants()


def test_a_second_release_raises_and_is_counted_and_harms_nothing() -> None:
    """F41: an error and a counter, not a dead engine: another's lock on the same node still protects it."""
    allocator = PageAllocator(10)
    cache = RadixCache(allocator, page_size=1)
    node = insert_prompt(cache, allocator, [1, 2, 3]).last_device_node
    mine, others = cache.lock(node), cache.lock(node)
    cache.release(mine)
    assert mine.released
    assert not others.released
    for count in (1, 2):
        with pytest.raises(DoubleReleaseError):
            cache.release(mine)
        assert cache.double_releases == count
    cache.check_invariants()
    assert cache.evict(3) == 0
    cache.release(others)
    assert cache.evict(3) == 3


def test_a_node_that_is_gone_cannot_be_locked() -> None:
    """A match that was not locked before something was evicted is a caller's mistake, and found."""
    allocator = PageAllocator(10)
    cache = RadixCache(allocator, page_size=1)
    evicted = insert_prompt(cache, allocator, [1, 2, 3]).last_device_node
    cache.evict(3)
    flushed = insert_prompt(cache, allocator, [1, 2, 3]).last_device_node
    root = cache.match_prefix(key_of([9]), 0.0).last_device_node
    cache.flush()
    for stale in (evicted, flushed, root):
        with pytest.raises(InternalError, match="not in this cache"):
            cache.lock(stale)
    cache.check_invariants()


def test_a_flush_frees_what_is_unlocked_and_keeps_what_is_read_until_it_is_released() -> None:
    """Nothing matches after a flush; locked pages stay allocated, also for a second reader, until the last receipt."""
    allocator = PageAllocator(10)
    cache = RadixCache(allocator, page_size=1)
    insert_prompt(cache, allocator, [1, 2, 3, 4, 5])
    inner = cache.match_prefix(key_of([1, 2]), 1.0)
    deeper = cache.match_prefix(key_of([1, 2, 3]), 1.0)
    readers = [cache.lock(inner.last_device_node), cache.lock(deeper.last_device_node)]
    cache.flush()
    assert cache.peek(key_of([1, 2, 3])) == 0
    assert (allocator.free_pages, cache.protected_pages, cache.evictable_pages) == (7, 3, 0)
    assert cache.evict(10) == 0
    cache.check_invariants()
    insert_prompt(cache, allocator, [1, 2, 3])
    assert (cache.protected_pages, cache.evictable_pages) == (3, 3)
    cache.release(readers[1])
    assert (allocator.free_pages, cache.protected_pages) == (5, 2)
    cache.flush()
    cache.check_invariants()
    cache.release(readers[0])
    assert (allocator.free_pages, cache.protected_pages) == (10, 0)
    with pytest.raises(DoubleReleaseError):
        cache.release(readers[0])
    cache.check_invariants()


def test_pages_that_a_flush_cut_off_never_enter_the_new_tree() -> None:
    """A request that outlives a flush inserts nothing, keeps reading all it read, and gives each page back once."""
    allocator = PageAllocator(12)
    cache = RadixCache(allocator, page_size=1)
    insert_prompt(cache, allocator, [1, 2])
    insert_prompt(cache, allocator, [1, 2, 3])
    match = cache.match_prefix(key_of([1, 2, 3, 4, 5]), 1.0)
    old = cache.lock(match.last_device_node)
    own = take(allocator, 2)
    cache.flush()
    result = cache.insert(key_of([1, 2, 3, 4, 5]), as_pages([*match.device_indices, *own]), 2.0)
    assert (result.prefix_tokens, result.inserted_tokens, len(result.device_indices)) == (0, 0, 0)
    new = cache.lock(result.last_device_node)
    cache.release(old)
    assert cache.protected_pages == 3
    assert cache.peek(key_of([1, 2, 3, 4, 5])) == 0
    allocator.free(own)
    cache.release(new)
    assert allocator.free_pages == 12
    cache.check_invariants()


def test_a_request_whose_pages_are_all_its_own_may_insert_after_a_flush() -> None:
    """Only what was cut off is kept out; a receipt for nothing is valid on both sides of a flush."""
    allocator = PageAllocator(6)
    cache = RadixCache(allocator, page_size=1)
    nothing = cache.lock(cache.match_prefix(key_of([1, 2]), 0.0).last_device_node)
    pages = take(allocator, 2)
    cache.flush()
    assert cache.insert(key_of([1, 2]), pages, 1.0).inserted_tokens == 2
    cache.release(nothing)
    cache.check_invariants()
    assert cache.evict(2) == 2


def parent_of(node: TreeNode) -> TreeNode | None:
    assert isinstance(node, TreeNode)
    return node.parent
