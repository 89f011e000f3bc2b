"""The three eviction policies: what each compares before recency, and that a parent never goes before its child."""

import gc

import pytest

from prefixmesh.cache.eviction import EvictionPolicy, RankedLine
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.errors import ConfigError
from tests.support.cache_kit import key_of, take


class Tree:
    """A tree under one policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.allocator = PageAllocator(500)
        self.cache = RadixCache(self.allocator, 1, RadixOptions(policy=policy))

    def put(self, *tokens: int, priority: int = 0) -> None:
        self.cache.insert(key_of(tokens), take(self.allocator, len(tokens)), 0.0, priority=priority)
        self.cache.check_invariants()

    def use(self, *tokens: int, priority: int = 0) -> None:
        self.cache.match_prefix(key_of(tokens), 1.0, priority)
        self.cache.check_invariants()

    def survivors(self, evicted: int, *prompts: int) -> list[int]:
        """Which one-token prompts are left after so many pages went."""
        assert self.cache.evict(evicted) == evicted
        self.cache.check_invariants()
        return [token for token in prompts if self.cache.peek(key_of([token]))]


def test_lru_gives_up_the_least_recently_used_however_often_it_was() -> None:
    tree = Tree("lru")
    tree.put(1)
    tree.put(2)
    for _ in range(5):
        tree.use(1)
    tree.use(2)
    assert tree.survivors(1, 1, 2) == [2]


def test_lfu_gives_up_the_one_with_fewest_hits_and_among_equals_the_older() -> None:
    tree = Tree("lfu")
    for token in (1, 2, 3):
        tree.put(token)
    for _ in range(5):
        tree.use(1)
    tree.use(2)
    tree.use(3)
    assert tree.survivors(1, 1, 2, 3) == [1, 3]
    assert tree.survivors(1, 1, 2, 3) == [1]


def test_priority_gives_up_the_lowest_whatever_was_used_last() -> None:
    """A match may raise a prompt, and nothing lowers it: a node's priority is the highest of its users'."""
    tree = Tree("priority")
    tree.put(1, priority=3)
    tree.put(2, priority=1)
    tree.put(3)
    tree.put(4, priority=-2)
    tree.use(3, priority=7)
    tree.use(3)
    assert tree.survivors(1, 1, 2, 3, 4) == [1, 2, 3]
    assert tree.survivors(1, 1, 2, 3) == [1, 3]
    assert tree.survivors(1, 1, 3) == [3]


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_a_parent_ranks_as_high_as_its_children(policy: EvictionPolicy) -> None:
    """Hits and priorities go along the whole path, so the child goes first, also when it alone is asked for most."""
    tree = Tree(policy)
    tree.put(1, 2)
    tree.put(1, 2, 3, 4, priority=9)
    tree.put(1, 2, 5, 6)
    for _ in range(4):
        tree.use(1, 2, 3, 4)
    assert tree.cache.evict(2) == 2
    assert tree.cache.peek(key_of([1, 2, 3, 4])) == 4
    assert tree.cache.evict(2) == 2
    assert tree.cache.peek(key_of([1, 2, 3, 4])) == 2


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_what_is_left_of_a_trimmed_leaf_is_still_the_first_to_go(policy: EvictionPolicy) -> None:
    tree = Tree(policy)
    tree.put(1, 1, 1)
    tree.put(2, 2, 2)
    for left in (2, 1, 0):
        assert tree.cache.evict(1) == 1
        assert (tree.cache.peek(key_of([1, 1, 1])), tree.cache.peek(key_of([2, 2, 2]))) == (left, 3)


@pytest.mark.parametrize("policy", ["lfu", "priority"])
def test_a_released_path_stands_in_its_rank_again(policy: EvictionPolicy) -> None:
    """While it was locked its hits and its priority rose; they count when it comes back."""
    tree = Tree(policy)
    tree.put(1)
    tree.put(2)
    receipt = tree.cache.lock(tree.cache.match_prefix(key_of([1]), 1.0).last_device_node)
    tree.use(1, priority=4)
    tree.use(2)
    tree.cache.release(receipt)
    assert tree.survivors(1, 1, 2) == [1]


def test_ranks_that_died_out_leave_nothing_behind() -> None:
    """A prompt that is hit a million times passes a million ranks."""
    tree = Tree("lfu")
    tree.put(1)
    for _ in range(1000):
        tree.use(1)
    line = tree.cache._accounts.lines.payer("").line
    assert isinstance(line, RankedLine)
    assert len(line._ranks) < 100


def test_payers_that_come_and_go_leave_nothing_for_the_collector() -> None:
    """A worker puts full collections off; whatever formed a ring would stay for ever."""
    gc.collect()
    gc.disable()
    try:
        tree = Tree("lfu")
        for number in range(50):
            tree.cache.insert(key_of([number]), take(tree.allocator, 1), 0.0, owner=f"tenant {number}")
            tree.cache.evict(1)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_policy_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="fifo"):
        RadixOptions(policy="fifo")  # type: ignore[arg-type]
