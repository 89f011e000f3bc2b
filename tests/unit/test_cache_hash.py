"""The hash cache: whole blocks of 16, and a fingerprint that proposes but never decides."""

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.hash_cache import HASH_BLOCK_SIZE, HashCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.errors import ConfigError, InternalError
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B, as_pages, insert_prompt, key_of, take


def make(page_size: int = 4, pages: int = 100) -> tuple[HashCache, PageAllocator]:
    allocator = PageAllocator(pages)
    return HashCache(allocator, page_size), allocator


def all_alike(namespace: bytes, packed: bytes, block_size: int) -> list[Fingerprint]:
    """The worst hash there is: every block has the same fingerprint."""
    return [Fingerprint(7)] * (len(packed) // (4 * block_size))


def by_place(namespace: bytes, packed: bytes, block_size: int) -> list[Fingerprint]:
    """A hash of the place alone: all first blocks collide, and all second ones."""
    return [Fingerprint(index) for index in range(len(packed) // (4 * block_size))]


def test_keeps_whole_blocks_only() -> None:
    """40 tokens are two blocks; the pages of the rest stay the caller's, though they are whole pages."""
    cache, allocator = make()
    pages = take(allocator, 10)
    result = cache.insert(key_of(range(40)), pages, 0.0)
    assert (result.prefix_tokens, result.inserted_tokens) == (0, 32)
    allocator.check_invariants({"cache": cache.owned_pages(), "caller": pages[8:]})
    assert cache.match_prefix(key_of(range(40)), 1.0).device_indices.tolist() == pages[:8].tolist()


def test_a_page_size_that_does_not_divide_a_block_is_refused() -> None:
    for page_size in (0, 3, 32):
        with pytest.raises(ConfigError, match="page_size"):
            HashCache(PageAllocator(1), page_size)


def test_a_colliding_fingerprint_is_a_miss_and_never_a_wrong_hit() -> None:
    """Other tokens under the same name: nothing matches, nothing is kept, and the first stays as it is."""
    allocator = PageAllocator(40)
    cache = HashCache(allocator, 4, fingerprints_of=by_place)
    first = list(range(32))
    insert_prompt(cache, allocator, first)
    other = list(range(100, 132))
    assert cache.match_prefix(key_of(other), 1.0).matched_tokens == 0
    pages = take(allocator, 8)
    result = cache.insert(key_of(other), pages, 1.0)
    assert (result.prefix_tokens, result.inserted_tokens) == (0, 0)
    allocator.check_invariants({"cache": cache.owned_pages(), "caller": pages})
    assert cache.peek(key_of(first)) == 32
    cache.check_invariants()


def test_equal_tokens_behind_another_block_are_no_hit() -> None:
    """A block is its whole prefix: equal tokens and an equal name do not make it follow what it does not follow."""
    allocator = PageAllocator(40)
    cache = HashCache(allocator, 4, fingerprints_of=by_place)
    tail = [5] * 16
    insert_prompt(cache, allocator, [1] * 16 + tail)
    # First block under a name of its own, second under the name that the other chain's second block has.
    cache._fingerprints_of = lambda *_: [Fingerprint(9), Fingerprint(1)]
    assert insert_prompt(cache, allocator, [2] * 16 + tail).inserted_tokens == 16
    assert cache.peek(key_of([2] * 16 + tail)) == 16


def test_one_name_for_every_block_still_answers_right() -> None:
    """With a hash that tells nothing apart, one block is kept and only its own prompt hits it."""
    allocator = PageAllocator(40)
    cache = HashCache(allocator, 16, fingerprints_of=all_alike)
    assert insert_prompt(cache, allocator, [1] * 48).inserted_tokens == 16
    assert cache.peek(key_of([1] * 48)) == 16
    assert cache.peek(key_of([2] * 48)) == 0


def test_a_collision_across_namespaces_is_no_hit() -> None:
    """Rule 8 does not rest on the fingerprint: the namespace itself is compared."""
    allocator = PageAllocator(40)
    cache = HashCache(allocator, 16, fingerprints_of=by_place)
    insert_prompt(cache, allocator, [1] * 32, namespace=NS_A)
    assert cache.peek(key_of([1] * 32, NS_B)) == 0
    assert insert_prompt(cache, allocator, [1] * 32, namespace=NS_B).inserted_tokens == 32
    assert cache.peek(key_of([1] * 32, NS_A)) == 32
    cache.check_invariants()


def test_evicts_whole_blocks_from_the_end_of_the_oldest_chain() -> None:
    """Asked for one page it gives a block; the chain's beginning goes last."""
    cache, allocator = make()
    insert_prompt(cache, allocator, range(48))
    insert_prompt(cache, allocator, range(100, 116))
    assert cache.evict(1) == HASH_BLOCK_SIZE // 4
    assert cache.peek(key_of(range(48))) == 32
    assert cache.evict(8) == 8
    assert (cache.peek(key_of(range(48))), cache.peek(key_of(range(100, 116)))) == (0, 16)
    cache.check_invariants()


def test_an_insert_frees_duplicates_and_gives_the_shared_pages() -> None:
    """Rule 7 holds for the baseline too."""
    cache, allocator = make(page_size=8)
    first, second = take(allocator, 4), take(allocator, 4)
    cache.insert(key_of([1] * 16 + [2] * 16), first, 0.0)
    result = cache.insert(key_of([1] * 16 + [3] * 16), second, 1.0)
    assert (result.prefix_tokens, result.inserted_tokens) == (16, 32)
    assert result.device_indices.tolist() == [*first[:2], *second[2:]]
    allocator.check_invariants({"cache": cache.owned_pages()})
    assert cache.insert(key_of([1] * 16), as_pages(first[:2].tolist()), 2.0).prefix_tokens == 16
    assert len(cache.owned_pages()) == 6


def test_repr_and_drawing() -> None:
    cache, allocator = make(page_size=16, pages=5)
    insert_prompt(cache, allocator, range(32))
    assert repr(cache) == (
        "HashCache(page_size=16, nodes=2, evictable=2, protected=0, free=3/5, detached=0, double_releases=0)"
    )
    assert cache.render().splitlines()[1:] == [
        "  namespace 61616161: 16 tokens device [0] lock_ref=0 receipts=0 hit_count=0 last_access_time=0",
        "    16 tokens device [1] lock_ref=0 receipts=0 hit_count=0 last_access_time=0",
    ]


def test_a_private_tail_is_its_tenants_alone() -> None:
    """A key with a boundary shares what lies before it, and nothing behind it."""
    cache, allocator = make(page_size=16, pages=20)
    tokens, tails = pack(range(64)), [Namespace(name * 16) for name in (b"x", b"y")]
    mine, theirs = (RadixKey(NS_A, tokens, 32, tail) for tail in tails)
    cache.insert(mine, take(allocator, 4), 0.0)
    assert (cache.peek(mine), cache.peek(theirs)) == (64, 32)
    assert cache.peek(RadixKey(NS_A, tokens)) == 32
    cache.insert(theirs, take(allocator, 4), 1.0)
    assert cache.evictable_pages == 6
    cache.check_invariants()
    with pytest.raises(InternalError, match="boundary at 8 tokens"):
        cache.peek(RadixKey(NS_A, tokens, 8, tails[0]))
