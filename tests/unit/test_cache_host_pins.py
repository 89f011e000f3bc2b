"""Pins of the host tier: what they keep there, how they grow, and that they are no pins of the device."""

import pytest

from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pins import PinBudget, PinStatus
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import BudgetError, InternalError
from tests.support.cache_kit import key_of
from tests.support.tier_kit import Tree

PROMPT = (1, 2, 3, 4)


def pin(tree: Tree, *tokens: int, ttl_s: float | None = None) -> PinStatus:
    """Pin these tokens on the host for acme."""
    status = tree.cache.pins_on(Tier.HOST).add(key_of(tokens), "acme", tree.now, ttl_s)
    tree.check()
    return status


def held(tree: Tree, *tokens: int) -> tuple[int, int]:
    """Tokens of acme's pin that are held, and that are missing."""
    status = tree.cache.pins_on(Tier.HOST).status(key_of(tokens), "acme")
    assert status is not None
    return status.held_tokens, status.missing_tokens


def unpin(tree: Tree, *tokens: int) -> None:
    tree.cache.pins_on(Tier.HOST).remove(key_of(tokens), "acme", tree.now)
    tree.check()


def test_what_is_pinned_on_the_host_is_never_evicted_there() -> None:
    """Its device pages may go: it is demoted like anything else, and stays on the host."""
    tree = Tree()
    tree.put(*PROMPT)
    tree.back_up(*PROMPT)
    status = pin(tree, *PROMPT)
    assert (status.tier, status.held_tokens, status.missing_tokens) == (Tier.HOST, 4, 0)
    assert tree.evict(30) == 4
    assert (tree.cache.evict_host(30), tree.found(*PROMPT)) == (0, (0, 4))
    assert tree.cache.pins_on(Tier.HOST).pinned_pages == tree.cache.host_figures.protected == 4
    unpin(tree, *PROMPT)
    tree.check_at_rest()


def test_a_pin_of_the_host_grows_when_a_backup_is_complete() -> None:
    """Not when KV comes to the device, which says nothing of the host."""
    tree = Tree()
    tree.put(1, 2)
    tree.back_up(1, 2)
    pin(tree, *PROMPT)
    assert held(tree, *PROMPT) == (2, 2)
    tree.put(*PROMPT)
    copy = tree.cache.transfers.begin_offload(tree.match(*PROMPT).last_device_node)
    assert copy is not None
    assert held(tree, *PROMPT) == (2, 2)
    tree.cache.transfers.finish_offload(copy)
    tree.check()
    assert held(tree, *PROMPT) == (4, 0)
    unpin(tree, *PROMPT)
    tree.check_at_rest()


def test_a_pin_of_what_is_nowhere_waits_for_its_copy() -> None:
    """Also where the copy has more than the pin, or only its front."""
    tree = Tree()
    pin(tree, *PROMPT)
    pin(tree, 1, 9)
    assert not tree.cache.pins.waiting
    tree.put(*PROMPT, 5)
    tree.back_up(*PROMPT, 5)
    assert (held(tree, *PROMPT), held(tree, 1, 9)) == ((4, 0), (1, 1))
    assert tree.cache.pins_on(Tier.HOST).pinned_pages == 4, "each page once"
    assert tree.cache.evict_host(30) == 1
    tree.check()


def test_a_pin_of_the_host_does_not_hold_what_only_the_device_has() -> None:
    tree = Tree()
    tree.put(*PROMPT)
    assert pin(tree, *PROMPT).held_tokens == 0
    assert tree.evict(30) == 4


def test_a_pin_of_the_device_is_none_of_the_host() -> None:
    tree = Tree()
    tree.put(*PROMPT)
    tree.back_up(*PROMPT)
    status = tree.cache.pins.add(key_of(PROMPT), "acme", tree.now)
    assert status.tier is Tier.DEVICE
    assert (tree.evict(30), tree.cache.evict_host(30)) == (0, 4)
    tree.check()
    assert (tree.cache.pinned_pages, tree.cache.pins_on(Tier.HOST).pinned_pages) == (4, 0)


def test_a_split_leaves_the_pin_on_both_halves() -> None:
    tree = Tree()
    tree.demote(*PROMPT)
    pin(tree, *PROMPT)
    tree.match(1, 2, 9)
    tree.check()
    assert tree.cache.evict_host(30) == 0
    unpin(tree, *PROMPT)
    tree.check_at_rest()


def test_a_flush_makes_a_pin_of_the_host_a_wish_again() -> None:
    tree = Tree()
    tree.demote(*PROMPT)
    pin(tree, *PROMPT)
    tree.cache.flush()
    tree.check()
    assert (held(tree, *PROMPT), tree.host.free_pages) == ((0, 4), 30)
    tree.put(*PROMPT)
    tree.back_up(*PROMPT)
    assert held(tree, *PROMPT) == (4, 0)


def test_each_tier_has_a_budget_in_its_own_pages() -> None:
    tree = Tree(pin_budget=PinBudget(pages_per_owner=2), host_pin_budget=PinBudget(pages_per_owner=5))
    pin(tree, *PROMPT)
    with pytest.raises(BudgetError, match="2 more wanted, 4 used, limit 5 pages per owner"):
        pin(tree, 5, 6)
    tree.cache.pins.add(key_of((5, 6)), "acme", tree.now)
    tree.check()
    assert tree.cache.pins_on(Tier.HOST).charged_to("acme") == 4


def test_without_a_bound_the_host_has_a_share_of_its_own_pool() -> None:
    tree = Tree(host=10)
    assert tree.cache.pins_on(Tier.HOST).budget.pages_in_all == 3


def test_pins_of_both_tiers_end_with_whatever_passes_the_time() -> None:
    """One look at the clock is for both: a match, an insert, or either table."""
    tree = Tree()
    tree.demote(*PROMPT)
    pin(tree, *PROMPT, ttl_s=5.0)
    tree.cache.pins.add(key_of((7,)), "acme", tree.now, 9.0)
    ends = tree.now + 5.0
    assert tree.cache.pins.next_expiry == tree.cache.pins_on(Tier.HOST).next_expiry == ends
    tree.cache.match_prefix(key_of(PROMPT), ends)
    tree.check()
    assert (len(tree.cache.pins_on(Tier.HOST)), len(tree.cache.pins)) == (0, 1)
    assert tree.cache.pins_on(Tier.HOST).next_expiry == ends + 4.0
    assert [ended.tier for ended in tree.cache.pins_on(Tier.HOST).expire(ends + 4.0)] == [Tier.DEVICE]
    tree.check_at_rest()


def test_a_cache_without_a_host_tier_has_no_pins_there() -> None:
    cache = RadixCache(PageAllocator(4), 1)
    assert cache.pins_on(Tier.DEVICE) is cache.pins
    with pytest.raises(InternalError, match="no host tier"):
        cache.pins_on(Tier.HOST)


def test_what_is_pinned_on_the_host_shows_in_a_drawing() -> None:
    tree = Tree()
    tree.demote(1, 2)
    pin(tree, 1, 2)
    assert "host_pins=1" in tree.cache.render()
    (only,) = tree.cache.pins_on(Tier.HOST).pins.values()
    assert repr(only).startswith("Pin('acme', host, ")
