"""Pins in the real tree: a pool that runs out, readers, splits, flushes, public prefixes."""

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pins import PinBudget, PinStatus
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.errors import AccessDeniedError, BudgetError, InvalidRequestError
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, as_pages, insert_prompt, key_of, take

NOW = 100.0
PROMPT = key_of([1, 2, 3, 4])
TAIL = Namespace(b"t" * 16)


def a_cache(pages: int) -> tuple[RadixCache, PageAllocator]:
    """With the default budget: all pins together may have three tenths of the pool."""
    allocator = PageAllocator(pages)
    return RadixCache(allocator, 1, RadixOptions(block_size=2)), allocator


def status(cache: RadixCache, key: RadixKey = PROMPT) -> PinStatus:
    cache.check_invariants()
    found = cache.pins.status(key, "acme")
    assert found is not None
    return found


def test_other_traffic_takes_every_page_but_the_pinned() -> None:
    """However much comes through a small pool, the pinned prompt stays a hit; what went on from it does not."""
    cache, allocator = a_cache(20)
    insert_prompt(cache, allocator, [1, 2, 3, 4, 5])
    cache.pins.add(PROMPT, "acme", NOW)
    for first in range(10, 40):
        cache.evict(8 - allocator.free_pages)
        insert_prompt(cache, allocator, [first, *range(7)])
        assert status(cache).held_tokens == 4
    assert cache.peek(key_of([1, 2, 3, 4, 5])) == 4
    cache.evict(20)
    assert (allocator.free_pages, cache.evictable_pages, cache.protected_pages) == (16, 0, 4)
    cache.pins.remove(PROMPT, "acme", NOW)
    assert cache.evict(20) == 4


def test_a_pin_holds_what_a_prompt_computes_and_no_more() -> None:
    """Growing splits the leaf that the prompt has just made, and a request that reads it is not disturbed."""
    cache, allocator = a_cache(20)
    cache.pins.add(PROMPT, "acme", NOW)
    result = cache.insert(key_of([1, 2, 3, 4, 5, 6]), take(allocator, 6), NOW)
    assert (status(cache).held_tokens, cache.pinned_pages) == (4, 4)
    reader = cache.lock(result.last_device_node)
    assert cache.evict(20) == 0
    cache.release(reader)
    assert cache.evict(20) == 2
    assert cache.match_prefix(PROMPT, NOW).device_indices.tolist() == result.device_indices[:4].tolist()


def test_a_flush_frees_what_is_pinned_and_keeps_the_wish() -> None:
    cache, allocator = a_cache(20)
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    cache.pins.add(PROMPT, "acme", NOW)
    cache.flush()
    assert (allocator.free_pages, status(cache).missing_tokens) == (20, 4)
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    assert status(cache).missing_tokens == 0


def test_pinning_is_no_hit_and_no_use_at_a_time() -> None:
    """Neither counts as a request, which it is not."""
    cache, allocator = a_cache(20)
    insert_prompt(cache, allocator, [1, 2, 3, 4], now=1.0)
    before = cache.match_prefix(PROMPT, 2.0).last_device_node
    told = before.hit_count, before.last_access_time
    cache.pins.add(PROMPT, "acme", NOW)
    assert (before.hit_count, before.last_access_time) == told


def test_a_match_lets_go_of_what_has_expired() -> None:
    cache, allocator = a_cache(20)
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    cache.pins.add(PROMPT, "acme", NOW, 5.0)
    cache.match_prefix(key_of([9]), NOW + 4)
    assert cache.pinned_pages == 4
    cache.match_prefix(key_of([9]), NOW + 5)
    assert (cache.pinned_pages, len(cache.pins)) == (0, 0)


def test_a_private_tail_behind_a_public_prefix_can_be_pinned() -> None:
    """It waits at the boundary, holds the public part too, and no other tenant's tail."""
    cache, allocator = a_cache(30)
    key = RadixKey(NS_A, key_of([1, 2, 3, 4]).tokens, 2, TAIL)
    cache.pins.add(key, "acme", NOW)
    insert_prompt(cache, allocator, [1, 2, 3, 4])
    assert (status(cache, key).held_tokens, cache.pinned_pages) == (2, 2)
    pages = [*cache.match_prefix(key, NOW).device_indices.tolist(), *take(allocator, 2).tolist()]
    cache.insert(key, as_pages(pages), NOW)
    assert (status(cache, key).held_tokens, cache.pinned_pages) == (4, 4)
    cache.evict(30)
    assert (cache.peek(key), cache.peek(PROMPT)) == (4, 2)


def test_a_boundary_that_nothing_follows_names_the_public_prefix() -> None:
    """One prefix, one pin, whichever way a prompt named it; a tail makes it another."""
    cache, _ = a_cache(40)
    public = key_of([1, 2])
    first = cache.pins.add(public, "acme", NOW)
    assert cache.pins.add(RadixKey(NS_A, public.tokens, 2, TAIL), "acme", NOW) == first
    longer = [
        cache.pins.add(key, "acme", NOW).digest
        for key in (PROMPT, PROMPT._replace(boundary_tokens=2, tail=TAIL))
    ]
    assert len({first.digest, *longer}) == len(cache.pins) == 3


def test_a_tenant_that_pins_a_thousand_prompts_leaves_others_their_pages() -> None:
    """F75, with the default budget: most of the pool goes on serving, and nobody unpins another's."""
    cache, allocator = a_cache(100)
    refused = 0
    for n in range(1000):
        cache.evict(10 - allocator.free_pages)
        insert_prompt(cache, allocator, [1000 + n, *range(9)])
        try:
            cache.pins.add(key_of([1000 + n, *range(9)]), "greedy", NOW)
        except BudgetError:
            refused += 1
    assert (refused, cache.pinned_pages) == (997, 30)
    assert cache.evictable_pages + allocator.free_pages == 70
    with pytest.raises(AccessDeniedError):
        cache.pins.remove(key_of([1000, *range(9)]), "acme", NOW)
    cache.check_invariants()


def test_budgets_of_the_options_bind() -> None:
    allocator = PageAllocator(100)
    cache = RadixCache(allocator, 1, RadixOptions(pin_budget=PinBudget(pages_per_owner=3, pages_in_all=90)))
    with pytest.raises(BudgetError, match="limit 3 pages per owner"):
        cache.pins.add(PROMPT, "acme", NOW)


def test_a_pin_whose_public_part_ends_nowhere_is_refused() -> None:
    """The tree could not divide there: such a pin would wait for ever."""
    cache, allocator = a_cache(20)
    with pytest.raises(InvalidRequestError, match=r"boundary_tokens: .* got 3"):
        cache.pins.add(RadixKey(NS_A, pack(range(8)), 3, TAIL), "acme", NOW)
    insert_prompt(cache, allocator, range(8))
    cache.check_invariants()
