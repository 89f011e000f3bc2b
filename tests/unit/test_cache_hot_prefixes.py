"""Which prefixes a worker that leaves hands over: those that saved most, each once, and no user's own rest of them."""

import pytest

from prefixmesh.cache import hot_prefixes
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.public import public_boundary
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack, unpack
from tests.support.cache_kit import NS_A, NS_B, insert_prompt, key_of, take

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


class Tree:
    """A tree of one-token pages, and a clock."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(5000)
        self.cache = RadixCache(self.allocator, 1, RadixOptions(block_size=2))
        self.now = 0.0

    def use(self, tokens: list[int], namespace: Namespace = NS_A, times: int = 1) -> None:
        """Requests for a prompt: the first inserts what is new, all of them match."""
        for _ in range(times):
            insert_prompt(self.cache, self.allocator, tokens, namespace=namespace, now=self.now)

    def hot(self, max_prefixes: int = 100, max_tokens: int = 10_000) -> list[list[int]]:
        before = self.cache.render()
        found = self.cache.hot_prefixes(self.now, max_prefixes=max_prefixes, max_tokens=max_tokens)
        assert self.cache.render() == before, "looking changes nothing"
        return [unpack(one.key.tokens).tolist() for one in found]


def test_what_nobody_has_found_again_is_not_hot() -> None:
    tree = Tree()
    assert tree.hot() == []
    tree.use(SYSTEM)
    assert tree.hot() == []
    tree.use(SYSTEM)
    assert tree.hot() == [SYSTEM]


def test_a_system_prompt_ends_where_its_users_part() -> None:
    """Also where one of them has come twice."""
    tree = Tree()
    for user in range(50):
        tree.use([*SYSTEM, 100 + user, 1, 2])
    tree.use([*SYSTEM, 100, 1, 2])
    assert tree.hot() == [SYSTEM]


def test_a_beginning_that_all_share_is_no_prefix_of_its_own() -> None:
    """Several prompts that each have their share of the hits go on from it."""
    tree = Tree()
    for prompt in ([9, 9, 1, 1, 1], [9, 9, 2, 2, 2, 2]):
        tree.use(prompt, times=5)
    assert tree.hot() == [[9, 9, 2, 2, 2, 2], [9, 9, 1, 1, 1]]


def test_what_saved_most_comes_first_and_what_does_not_fit_leaves_its_room() -> None:
    tree = Tree()
    tree.use([1] * 40, times=3)
    tree.use([2] * 10, times=30)
    tree.use([3] * 5, times=4)
    assert tree.hot() == [[2] * 10, [1] * 40, [3] * 5]
    assert tree.hot(max_prefixes=2) == [[2] * 10, [1] * 40]
    assert tree.hot(max_tokens=20) == [[2] * 10, [3] * 5]
    assert tree.hot(max_tokens=4) == []


def test_what_was_hot_long_ago_is_not() -> None:
    tree = Tree()
    tree.use(SYSTEM, times=100)
    tree.now = hot_prefixes.RECENT_S + 1.0
    tree.use([9, 9, 9], times=2)
    assert tree.hot() == [[9, 9, 9]]


def test_a_prefix_is_told_with_its_namespace_its_hits_and_its_payer() -> None:
    tree = Tree()
    tree.use(SYSTEM, NS_B, times=4)
    key = key_of([7, 7], NS_A)
    tree.cache.insert(key, take(tree.allocator, 2), 0.0, owner="acme")
    tree.cache.match_prefix(key, 0.0)
    first, second = tree.cache.hot_prefixes(0.0, max_prefixes=9, max_tokens=99)
    assert (first.key, first.hits, first.owner) == (key_of(SYSTEM, NS_B), 3, "")
    assert (second.key, second.hits, second.owner) == (key, 1, "acme")


def test_what_lies_behind_a_public_prefix_is_told_with_its_boundary() -> None:
    tree = Tree()
    public = public_boundary(NS_B, pack(SYSTEM), page_size=1, block_size=2)
    assert public is not None
    key: RadixKey = public.key(NS_A, pack([*SYSTEM, 40, 41]))
    tree.cache.insert(key, take(tree.allocator, 10), 0.0)
    tree.cache.match_prefix(key, 0.0)
    (found,) = tree.cache.hot_prefixes(0.0, max_prefixes=9, max_tokens=99)
    assert found.key == key
    assert tree.cache.peek(found.key) == 10


def test_wide_and_deep_trees_are_looked_at_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made first is looked at first; of a node's children the most used are gone on from."""
    monkeypatch.setattr(hot_prefixes, "MAX_LOOKS", 10)
    monkeypatch.setattr(hot_prefixes, "MAX_WIDTH", 3)
    tree = Tree()
    for first in range(1, 21):
        tree.use([first, first], times=2 + first)
    assert tree.hot() == [[10, 10], [9, 9], [8, 8]]
    monkeypatch.setattr(hot_prefixes, "MAX_LOOKS", 1000)
    monkeypatch.setattr(hot_prefixes, "MAX_PATHS", 1)
    tree.use([20, 20, 5, 5], times=30)
    assert tree.hot(max_prefixes=1) == [[20, 20]], "a path ends where it may not go on"
