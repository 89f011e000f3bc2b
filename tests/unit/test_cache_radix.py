"""The radix cache: matches, splits, inserts, and what they leave behind."""

import gc
import weakref

import numpy as np
import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import TreeNode, nodes_below
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.errors import ConfigError, InternalError
from prefixmesh.ids import Namespace
from prefixmesh.tokens import TOKEN_BYTES, pack, unpack
from tests.support.cache_kit import NS_A, NS_B, as_pages, insert_prompt, key_of, take


def make(page_size: int = 1, pages: int = 400) -> tuple[RadixCache, PageAllocator]:
    allocator = PageAllocator(pages)
    return RadixCache(allocator, page_size), allocator


def line_of(cache: RadixCache) -> list[TreeNode]:
    return list(cache._accounts.lines.payer("").line)


def nodes_of(cache: RadixCache) -> list[TreeNode]:
    return [node for _, node in nodes_below(cache._accounts.root)]


def test_a_match_is_a_true_prefix() -> None:
    """F7: what is cached counts from its start; the same tokens in the middle of a prompt count for nothing."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    assert cache.match_prefix(key_of([1, 2, 3, 4, 9]), 1.0).matched_tokens == 4
    assert cache.match_prefix(key_of([9, 1, 2, 3, 4]), 1.0).matched_tokens == 0
    assert cache.match_prefix(key_of([2, 3, 4]), 1.0).matched_tokens == 0
    assert cache.match_prefix(key_of([]), 1.0).matched_tokens == 0


def test_a_match_inside_an_edge_splits_it_and_copies_no_kv() -> None:
    """The front of the edge keeps the pages it had; the node that was there keeps its end."""
    cache, allocator = make()
    pages = insert_prompt(cache, allocator, [1, 2, 3, 4, 5]).device_indices
    (tail,) = nodes_of(cache)
    match = cache.match_prefix(key_of([1, 2, 3, 9]), 1.0)
    assert match.device_indices.tolist() == pages[:3].tolist()
    upper, lower = nodes_of(cache)
    assert match.last_device_node is upper
    assert lower is tail
    assert (unpack(upper.key).tolist(), unpack(lower.key).tolist()) == ([1, 2, 3], [4, 5])
    assert lower.value.tolist() == pages[3:].tolist()
    assert allocator.free_pages == 395
    cache.check_invariants()


def test_a_split_leaves_locks_times_and_hits_on_both_halves() -> None:
    """Whoever uses the tail uses its front: what protects and dates one protects and dates the other."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3, 4], now=3.0)
    whole = cache.match_prefix(key_of([1, 2, 3, 4]), 5.0)
    first, second = cache.lock(whole.last_device_node), cache.lock(whole.last_device_node)
    (tail,) = nodes_of(cache)
    cache.insert(key_of([1, 2, 8]), as_pages([*whole.device_indices[:2], *take(allocator, 1)]), 6.0)
    upper = tail.parent
    assert upper is not None
    assert (upper.lock_ref, tail.lock_ref) == (2, 2)
    assert (upper.hit_count, tail.hit_count) == (1, 1)
    assert (upper.creation_time, tail.creation_time) == (3.0, 3.0)
    assert (upper.last_access_time, tail.last_access_time) == (6.0, 5.0)
    cache.release(first)
    assert (upper.lock_ref, tail.lock_ref, cache.protected_pages, cache.evictable_pages) == (1, 1, 4, 1)
    cache.release(second)
    assert (upper.lock_ref, tail.lock_ref, cache.protected_pages, cache.evictable_pages) == (0, 0, 0, 5)
    cache.check_invariants()


def test_a_split_by_itself_dates_both_halves_alike() -> None:
    """Rule 4 holds for the split alone, whatever use of its path comes next."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3], now=3.0)
    cache.match_prefix(key_of([1, 2, 3]), 5.0)
    (node,) = nodes_of(cache)
    upper = cache._accounts.split(node, TOKEN_BYTES, 1, node.key[TOKEN_BYTES : 2 * TOKEN_BYTES], 0)
    for half in (upper, node):
        assert (half.creation_time, half.last_access_time, half.hit_count) == (3.0, 5.0, 1)
    cache.check_invariants()


def test_a_match_dates_the_path_and_a_split_alone_does_not_date_the_tail() -> None:
    """The tail behind a split was not used, so it keeps its time; the new front is used and takes the match's."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3, 4], now=3.0)
    cache.match_prefix(key_of([1, 2, 9]), 7.0)
    upper, lower = nodes_of(cache)
    assert (upper.last_access_time, lower.last_access_time) == (7.0, 3.0)
    assert (upper.hit_count, lower.hit_count) == (1, 0)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4, 5, 6], [7]])
def test_peek_says_what_a_match_would_and_changes_nothing(tokens: list[int]) -> None:
    """No split, no time, no hit, no order: the drawing stays equal, and so does what is evicted next."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3, 4, 5])
    insert_prompt(cache, allocator, [7, 8], now=1.0)
    before, order = cache.render(), line_of(cache)
    peeked = cache.peek(key_of(tokens))
    assert cache.render() == before
    assert line_of(cache) == order
    assert peeked == cache.match_prefix(key_of(tokens), 2.0).matched_tokens


def test_equal_tokens_in_two_namespaces_share_no_node() -> None:
    """Rule 8, with the hit of the own namespace beside it, or a cache that is off would pass."""
    cache, allocator = make()
    mine = insert_prompt(cache, allocator, [1, 2, 3], namespace=NS_A)
    assert cache.match_prefix(key_of([1, 2, 3], NS_B), 1.0).matched_tokens == 0
    theirs = insert_prompt(cache, allocator, [1, 2, 3], namespace=NS_B)
    assert theirs.prefix_tokens == 0
    assert set(mine.device_indices.tolist()).isdisjoint(theirs.device_indices.tolist())
    assert (
        cache.match_prefix(key_of([1, 2, 3], NS_A), 1.0).device_indices.tolist()
        == mine.device_indices.tolist()
    )
    assert cache.peek(key_of([1, 2, 3], NS_B)) == 3


def test_a_key_shorter_than_a_page_finds_nothing_under_any_namespace() -> None:
    """The namespace stands before the first page's bytes; no shorter key may be read as another namespace's page."""
    cache, allocator = make(page_size=4)
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    assert cache.peek(key_of([1, 2, 3])) == 0
    assert cache.match_prefix(key_of([1, 2, 3]), 1.0).matched_tokens == 0
    longer = Namespace(NS_A + pack([1]))
    assert cache.peek(key_of([2, 3, 4], longer)) == 0
    assert cache.match_prefix(key_of([2, 3, 4], longer), 1.0).matched_tokens == 0
    cache.check_invariants()


@pytest.mark.parametrize("offset", range(16))
def test_divergence_at_any_offset_of_a_page_matches_whole_pages(offset: int) -> None:
    """F42: with pages of 16, a prompt that leaves another at any offset matches a multiple of 16 tokens of its pages."""
    cache, allocator = make(page_size=16)
    tokens = list(range(48))
    pages = insert_prompt(cache, allocator, tokens).device_indices.tolist()
    for first_different in (offset, 16 + offset, 32 + offset):
        other = [*tokens[:first_different], 999, *tokens[first_different + 1 :]]
        expected = first_different - first_different % 16
        assert cache.peek(key_of(other)) == expected
        match = cache.match_prefix(key_of(other), 1.0)
        assert match.matched_tokens == expected
        assert match.device_indices.tolist() == pages[: expected // 16]
        assert insert_prompt(cache, allocator, other).prefix_tokens == expected
        cache.check_invariants()
    assert cache.peek(key_of(tokens)) == 48


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_an_insert_keeps_whole_pages_and_leaves_the_rest_to_the_caller(page_size: int) -> None:
    """Tokens short of a page are not kept, and pages beyond those kept stay the caller's, however many it passes."""
    cache, allocator = make(page_size)
    tokens = list(range(5 * page_size + (page_size > 1)))
    pages = take(allocator, 8)
    result = cache.insert(key_of(tokens), pages, 0.0)
    assert (result.prefix_tokens, result.inserted_tokens) == (0, 5 * page_size)
    assert result.device_indices.tolist() == pages[:5].tolist()
    assert cache.peek(key_of(tokens)) == 5 * page_size
    allocator.check_invariants({"cache": cache.owned_pages(), "caller": pages[5:]})


def test_an_insert_frees_duplicates_and_gives_the_shared_pages() -> None:
    """Rule 7: of two requests that computed one prefix at once, the second gets the first's pages and loses its own."""
    cache, allocator = make(page_size=2)
    first, second = take(allocator, 3), take(allocator, 4)
    cache.insert(key_of([1, 2, 3, 4, 5, 6]), first, 0.0)
    result = cache.insert(key_of([1, 2, 3, 4, 7, 8, 9]), second, 1.0)
    assert (result.prefix_tokens, result.inserted_tokens) == (4, 6)
    assert result.device_indices.tolist() == [first[0], first[1], second[2]]
    assert set(allocator.listing().tolist()) >= {second[0], second[1]}
    allocator.check_invariants({"cache": cache.owned_pages(), "caller": second[3:]})
    cache.check_invariants()


def test_an_insert_recognises_the_pages_that_are_the_trees_own() -> None:
    """The same prompt inserted again with the pages it was given frees nothing and keeps nothing new."""
    cache, allocator = make()
    result = insert_prompt(cache, allocator, [1, 2, 3])
    again = cache.insert(key_of([1, 2, 3]), result.device_indices, 1.0)
    assert (again.prefix_tokens, again.inserted_tokens) == (3, 3)
    assert again.last_device_node is result.last_device_node
    assert allocator.free_pages == 397
    cache.check_invariants()


def test_an_insert_that_would_free_a_page_twice_changes_nothing() -> None:
    """The caller's mistake is refused before the tree or the pool has moved."""
    cache, allocator = make()
    insert_prompt(cache, allocator, [1, 2, 3])
    before = cache.render()
    with pytest.raises(InternalError, match="double free"):
        cache.insert(key_of([1, 2, 8]), as_pages([50, 51, 52]), 1.0)
    assert cache.render() == before
    cache.check_invariants()


def test_an_insert_with_too_few_pages_is_refused() -> None:
    """A key without KV for all its whole pages is a caller's mistake."""
    cache, allocator = make(page_size=2)
    pages = take(allocator, 1)
    with pytest.raises(InternalError, match="2 pages of tokens with 1 pages"):
        cache.insert(key_of([1, 2, 3, 4]), pages, 0.0)


def test_no_index_array_keeps_a_larger_one_alive() -> None:
    """F36: after splits, inserts and trims every node's indices are an array of their own, and the long ones are gone."""
    cache, allocator = make()
    long = take(allocator, 300)
    cache.insert(key_of(range(200)), long, 0.0)
    callers = weakref.ref(long)
    del long
    match = cache.match_prefix(key_of([*range(100), 999]), 1.0)
    cache.evict(10)
    gc.collect()
    assert callers() is None, "the caller's array is still alive"
    assert [len(node.value) for node in nodes_of(cache)] == [100, 90]
    for node, pages in zip(nodes_of(cache), (100, 90), strict=True):
        assert type(node.pages) is bytes
        assert len(node.pages) == 4 * pages
    assert match.device_indices.nbytes == len(nodes_of(cache)[0].pages)


def test_results_cannot_change_the_tree() -> None:
    """What a match or an insert returns may be the tree's own indices: reading is free, writing is refused."""
    cache, allocator = make()
    inserted = insert_prompt(cache, allocator, [1, 2, 3])
    matched = cache.match_prefix(key_of([1, 2, 3]), 1.0)
    for indices in (inserted.device_indices, matched.device_indices):
        with pytest.raises(ValueError, match="read-only"):
            indices[:] = 77
    cache.check_invariants()


def test_matched_edges_of_thousands_of_tokens_are_compared_exactly() -> None:
    """A difference in the last token of a long edge is found, and so is one in the first."""
    cache, allocator = make(pages=9000)
    tokens = np.arange(4096)
    insert_prompt(cache, allocator, tokens.tolist())
    for index in (4095, 2048, 1, 0):
        other = tokens.copy()
        other[index] = 2**32 - 1
        assert cache.peek(key_of(other.tolist())) == index
    assert cache.peek(key_of(tokens.tolist())) == 4096


def test_a_deep_tree_needs_no_recursion() -> None:
    """A chain of 1,200 nodes: match, check, flush and release walk, they do not recurse."""
    cache, allocator = make(pages=1200)
    pages = take(allocator, 1200)
    packed = pack(range(1200))
    for end in range(1, 1201):
        result = cache.insert(RadixKey(NS_A, packed[: end * TOKEN_BYTES]), pages, float(end))
    assert cache.node_count == 1200
    receipt = cache.lock(result.last_device_node)
    cache.check_invariants()
    cache.flush()
    assert allocator.free_pages == 0
    cache.check_invariants()
    cache.release(receipt)
    assert allocator.free_pages == 1200


def test_render_draws_lengths_and_locks_and_no_tokens() -> None:
    cache, allocator = make()
    insert_prompt(cache, allocator, [70001, 70002, 70003])
    insert_prompt(cache, allocator, [70001, 70002, 70009])
    cache.lock(cache.match_prefix(key_of([70001, 70002, 70003]), 4.0).last_device_node)
    assert cache.render().splitlines() == [
        "root lock_ref=1",
        "  namespace 61616161: 2 tokens device [0, 1] lock_ref=1 receipts=0 hit_count=2 last_access_time=4",
        "    1 tokens device [2] lock_ref=1 receipts=1 hit_count=1 last_access_time=4",
        "    1 tokens device [3] lock_ref=0 receipts=0 hit_count=0 last_access_time=0",
    ]


def test_a_drawing_is_bounded() -> None:
    """A tree of thousands of nodes is drawn in part, and says so."""
    cache, allocator = make()
    for token in range(300):
        insert_prompt(cache, allocator, [token])
    assert cache.render().splitlines()[-1] == "... and 100 more nodes"


def test_repr_is_a_summary() -> None:
    cache, allocator = make(page_size=2, pages=10)
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    cache.lock(cache.match_prefix(key_of([1, 2]), 0.0).last_device_node)
    assert repr(cache) == (
        "RadixCache(page_size=2, nodes=2, evictable=1, protected=1, free=8/10, detached=0, double_releases=0)"
    )


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError):
        RadixCache(PageAllocator(1), 0)
