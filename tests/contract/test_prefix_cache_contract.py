"""What every prefix cache promises, whichever stands behind ``--prefix-cache``."""

from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest

from prefixmesh import config
from prefixmesh.cache import eviction
from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.factory import CacheKind, make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.config import PrefixCacheKind
from prefixmesh.errors import ConfigError, DoubleReleaseError
from tests.support.cache_kit import NS_A, NS_B, as_pages, insert_prompt, key_of, take

KINDS: tuple[CacheKind, ...] = ("radix", "hash", "off")
POOL_PAGES = 4000


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(POOL_PAGES)


@pytest.fixture(
    params=[(kind, size) for kind in KINDS for size in (1, 2, 16)], ids=lambda p: f"{p[0]}-page{p[1]}"
)
def cache(request: pytest.FixtureRequest, allocator: PageAllocator) -> Iterator[PrefixCache]:
    """Each kind with each page size; its invariants hold after every test."""
    kind, page_size = request.param
    cache = make_prefix_cache(kind, allocator, page_size)
    assert cache.page_size == page_size
    yield cache
    cache.check_invariants()


def test_the_settings_name_the_caches_that_exist() -> None:
    """The configuration's words and the factory's are the same."""
    assert set(get_args(PrefixCacheKind)) == set(KINDS) == set(get_args(CacheKind))
    assert get_args(config.EvictionPolicy) == get_args(eviction.EvictionPolicy)


@pytest.mark.parametrize("kind", ["hash", "off"])
def test_only_the_radix_cache_has_options(kind: CacheKind, allocator: PageAllocator) -> None:
    """An option that would do nothing is refused; the default ones say nothing."""
    make_prefix_cache(kind, allocator, 1, RadixOptions(policy="lru"))
    with pytest.raises(ConfigError, match=f"eviction_policy .* not {kind}"):
        make_prefix_cache(kind, allocator, 1, RadixOptions(policy="lfu"))


def test_the_radix_cache_evicts_by_the_policy_it_is_given(allocator: PageAllocator) -> None:
    """What was found oftener stays, although the other was found last."""
    cache = make_prefix_cache("radix", allocator, 1, RadixOptions(policy="lfu"))
    for tokens in ([1, 2, 3], [4, 5, 6]):
        insert_prompt(cache, allocator, tokens)
    for tokens in ([1, 2, 3], [1, 2, 3], [4, 5, 6]):
        cache.match_prefix(key_of(tokens), 1.0)
    cache.evict(3)
    assert [cache.peek(key_of(tokens)) for tokens in ([1, 2, 3], [4, 5, 6])] == [3, 0]


@pytest.mark.parametrize(("kind", "cached"), [("radix", 1490), ("hash", 1488), ("off", 0)])
def test_1500_tokens_sharing_1490(kind: CacheKind, cached: int, allocator: PageAllocator) -> None:
    """The radix tree finds all that is shared, the blocks all but the last begun one, and off nothing."""
    cache = make_prefix_cache(kind, allocator, page_size=1)
    shared = list(range(1490))
    insert_prompt(cache, allocator, [*shared, *range(5000, 5010)])
    prompt = key_of([*shared, *range(6000, 6010)])
    assert cache.peek(prompt) == cached
    match = cache.match_prefix(prompt, 1.0)
    assert (match.matched_tokens, len(match.device_indices)) == (cached, cached)
    cache.check_invariants()


def test_what_was_inserted_is_matched_in_whole_pages_of_its_own(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """After an insert its kept tokens match, in the pages it returned, and peek says the same."""
    tokens = list(range(75))
    result = insert_prompt(cache, allocator, tokens)
    assert result.prefix_tokens == 0
    assert result.inserted_tokens % cache.page_size == 0
    match = cache.match_prefix(key_of([*tokens, 999]), 1.0)
    assert match.matched_tokens == result.inserted_tokens == cache.peek(key_of(tokens))
    assert match.device_indices.tolist() == result.device_indices.tolist()
    assert match.device_indices.dtype == result.device_indices.dtype == np.int32
    assert len(match.device_indices) * cache.page_size == match.matched_tokens
    cached = cache.evictable_pages + cache.protected_pages
    assert cached == len(match.device_indices)
    assert allocator.free_pages == POOL_PAGES - cached


def test_nothing_matches_in_an_empty_cache_or_in_another_namespace(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """F46, F48 (first form): another namespace finds nothing, while the own one finds all that is kept."""
    tokens = list(range(64))
    assert cache.match_prefix(key_of(tokens), 0.0).matched_tokens == 0
    kept = insert_prompt(cache, allocator, tokens, namespace=NS_A).inserted_tokens
    assert cache.match_prefix(key_of(tokens, NS_B), 1.0).matched_tokens == 0
    assert cache.match_prefix(key_of(tokens, NS_A), 1.0).matched_tokens == kept


def test_pages_beyond_what_was_inserted_stay_the_callers(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """The caller owns exactly its pages from ``inserted_tokens // page_size`` on: it may free them, and only them."""
    tokens = list(range(41))
    pages = take(allocator, len(tokens) // cache.page_size + 3)
    result = cache.insert(key_of(tokens), pages, 0.0)
    kept = result.inserted_tokens // cache.page_size
    assert result.device_indices.tolist() == pages[:kept].tolist()
    allocator.free(pages[kept:])
    assert allocator.free_pages + cache.evictable_pages == POOL_PAGES


def test_the_second_of_two_equal_prompts_gets_the_firsts_pages(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """Rule 7: its duplicates are free, what it passed beyond is its own, and nothing is owned twice."""
    tokens = list(range(48))
    first, second = take(allocator, 48 // cache.page_size), take(allocator, 48 // cache.page_size)
    one = cache.insert(key_of(tokens), first, 0.0)
    two = cache.insert(key_of(tokens), second, 1.0)
    assert two.prefix_tokens == one.inserted_tokens
    assert two.device_indices.tolist() == one.device_indices.tolist()
    kept = two.inserted_tokens // cache.page_size
    allocator.free(as_pages([*first[kept:], *second[kept:]]))
    assert allocator.free_pages + cache.evictable_pages == POOL_PAGES


def test_a_locked_prefix_survives_eviction_and_a_released_one_does_not(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """Pages move between evictable and protected with the lock, and evict gives what it says."""
    tokens = list(range(64))
    kept = insert_prompt(cache, allocator, tokens).inserted_tokens // cache.page_size
    receipt = cache.lock(cache.match_prefix(key_of(tokens), 1.0).last_device_node)
    assert (cache.evictable_pages, cache.protected_pages) == (0, kept)
    assert cache.evict(1000) == 0
    cache.release(receipt)
    assert (cache.evictable_pages, cache.protected_pages) == (kept, 0)
    assert cache.evict(1000) == kept
    assert allocator.free_pages == POOL_PAGES
    assert cache.peek(key_of(tokens)) == 0


def test_a_receipt_is_good_for_one_release(cache: PrefixCache, allocator: PageAllocator) -> None:
    """F41: the second raises and is counted; the pages are as they were, and the cache goes on."""
    insert_prompt(cache, allocator, list(range(32)))
    receipt = cache.lock(cache.match_prefix(key_of(range(32)), 1.0).last_device_node)
    cache.release(receipt)
    before = (cache.evictable_pages, cache.protected_pages)
    with pytest.raises(DoubleReleaseError):
        cache.release(receipt)
    assert cache.double_releases == 1
    assert (cache.evictable_pages, cache.protected_pages) == before
    insert_prompt(cache, allocator, list(range(100, 132)))


def test_a_flush_forgets_and_keeps_what_is_read_until_its_release(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """Rule 10, and the same tokens may be cached anew while the old pages are still read."""
    tokens = list(range(64))
    kept = insert_prompt(cache, allocator, tokens).inserted_tokens // cache.page_size
    receipt = cache.lock(cache.match_prefix(key_of(tokens), 1.0).last_device_node)
    insert_prompt(cache, allocator, [*range(32), *range(500, 532)])
    cache.flush()
    assert cache.peek(key_of(tokens)) == 0
    assert (cache.evictable_pages, cache.protected_pages) == (0, kept)
    assert allocator.free_pages == POOL_PAGES - kept
    cache.check_invariants()
    assert insert_prompt(cache, allocator, tokens).prefix_tokens == 0
    cache.release(receipt)
    assert cache.protected_pages == 0
    assert cache.evict(1000) == kept
    assert allocator.free_pages == POOL_PAGES


def test_an_empty_prompt_is_a_miss_like_any_other(cache: PrefixCache) -> None:
    """No tokens: nothing matched, nothing kept, a receipt all the same."""
    match = cache.match_prefix(key_of([]), 0.0)
    assert match.matched_tokens == 0
    cache.release(cache.lock(match.last_device_node))
    assert cache.insert(key_of([]), as_pages([]), 0.0).inserted_tokens == 0
    assert cache.evict(1) == 0
