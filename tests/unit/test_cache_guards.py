"""Guards that no other test of one question looks at by itself; `make mutants` takes each of them out."""

import itertools

import pytest

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import MatchResult
from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pin import PinBudget
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, key_of, take
from tests.support.event_readers import Listener
from tests.support.scheduling import Bench


class Tree:
    """Pages of one token on two tiers, and somebody who hears of every block of two tokens."""

    def __init__(self, device: int = 20, host: int = 20) -> None:
        lives = itertools.count(1)
        self.device, self.host = PageAllocator(device), PageAllocator(host)
        self.listener = Listener(CachePublisher(lambda: Epoch(next(lives))))
        options = RadixOptions(host=self.host, block_size=2, events=self.listener)
        self.cache = RadixCache(self.device, 1, options)

    def put(self, *tokens: int) -> None:
        self.cache.insert(key_of(tokens), take(self.device, len(tokens)), 0.0)
        self.check()

    def match(self, *tokens: int) -> MatchResult:
        match = self.cache.match_prefix(key_of(tokens), 0.0)
        self.check()
        return match

    def back_up(self, *tokens: int) -> None:
        copy = self.cache.transfers.begin_offload(self.match(*tokens).last_device_node)
        assert copy is not None
        self.cache.transfers.finish_offload(copy)
        self.check()

    def evict(self, tier: Tier, pages: int) -> None:
        freed = self.cache.evict(pages) if tier is Tier.DEVICE else self.cache.evict_host(pages)
        assert freed == pages
        self.check()

    def check(self) -> None:
        """What was told is what there is, on each tier."""
        self.cache.check_invariants()
        for tier in Tier:
            assert self.listener.blocks[tier].keys() == self.cache.blocks(tier)


def a_cache(policy: EvictionPolicy = "lru") -> tuple[RadixCache, PageAllocator]:
    """Pages of one token on the device alone, half of which may be pinned."""
    allocator = PageAllocator(20)
    options = RadixOptions(policy=policy, block_size=2, pin_budget=PinBudget(pages_in_all=10))
    return RadixCache(allocator, 1, options), allocator


@pytest.mark.parametrize("tier", list(Tier))
def test_every_block_is_told_that_a_trim_takes(tier: Tier) -> None:
    """From the tier that holds it alone."""
    tree = Tree()
    tree.put(1, 2, 3, 4, 5, 6)
    if tier is Tier.HOST:
        tree.back_up(1, 2, 3, 4, 5, 6)
        tree.evict(Tier.DEVICE, 6)
    for left in (3, 2, 2, 1):
        assert len(tree.cache.blocks(tier)) == left
        tree.evict(tier, 1)
    assert tree.cache.node_count == 1


def test_every_block_is_told_that_comes_back_or_is_copied() -> None:
    """By a copy that ended, and by somebody who computed it again."""
    tree = Tree()
    tree.put(1, 2, 3, 4)
    tree.back_up(1, 2, 3, 4)
    assert len(tree.cache.blocks(Tier.HOST)) == 2
    tree.evict(Tier.DEVICE, 4)
    tree.put(1, 2)
    assert len(tree.cache.blocks(Tier.DEVICE)) == 1
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3, 4))
    assert copy is not None
    tree.cache.transfers.finish_restore(copy)
    tree.check()
    assert len(tree.cache.blocks(Tier.DEVICE)) == 2


@pytest.mark.parametrize("tier", list(Tier))
def test_what_is_left_of_the_first_to_go_is_still_the_first(tier: Tier) -> None:
    """Also where it lives on the other tier too, and was cut into two nodes."""
    tree = Tree()
    for prompt in ((1, 2, 3, 4), (5, 6)):
        tree.put(*prompt)
        tree.back_up(*prompt)
    tree.evict(tier, 2)
    assert tree.cache.node_count == 3
    tree.evict(tier, 2)
    assert tree.cache.blocks(tier) == set(block_fingerprints(NS_A, pack([5, 6]), 2))


def test_what_a_reader_let_go_of_goes_after_what_others_used_before() -> None:
    """A release is the last use of what it protected, whoever pays for it."""
    cache, allocator = a_cache()
    cache.insert(key_of([1, 2]), take(allocator, 2), 0.0, owner="acme")
    reader = cache.lock(cache.match_prefix(key_of([1, 2]), 0.0).last_device_node)
    cache.insert(key_of([5, 6]), take(allocator, 2), 0.0, owner="globex")
    cache.release(reader)
    cache.evict(2)
    assert (cache.peek(key_of([1, 2])), cache.peek(key_of([5, 6]))) == (2, 0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_pin_is_on_both_halves_of_a_split(cut: int) -> None:
    """So that its end undoes what it did, and nothing else."""
    cache, allocator = a_cache()
    cache.insert(key_of([1, 2, 3, 4]), take(allocator, 4), 0.0)
    cache.pins.add(key_of([1, 2, 3, 4]), "acme", 0.0)
    cache.match_prefix(key_of([1, 2, 3, 4][:cut]), 0.0)
    cache.check_invariants()
    assert cache.pinned_pages == 4
    cache.pins.remove(key_of([1, 2, 3, 4]), "acme", 0.0)
    cache.check_invariants()
    assert (cache.pinned_pages, cache.evict(4)) == (0, 4)


def test_a_priority_is_that_of_the_whole_path_and_of_both_halves_of_a_split() -> None:
    """A parent never ranks below its child: it would come up for eviction first."""
    cache, allocator = a_cache(policy="priority")
    for prompt, priority in (([1], 0), ([1, 2], 0), ([1, 2, 3, 4], 5), ([8], 3)):
        cache.insert(key_of(prompt), take(allocator, len(prompt)), 0.0, priority=priority)
        cache.check_invariants()
    cache.match_prefix(key_of([1, 2, 3]), 0.0)
    cache.check_invariants()
    cache.evict(1)
    assert (cache.peek(key_of([1, 2, 3, 4])), cache.peek(key_of([8]))) == (4, 0)


def test_a_copy_that_cannot_begin_evicts_nothing() -> None:
    """Some pages could be had, but not enough."""
    tree = Tree(device=8, host=8)
    tree.put(1, 2, 3, 4)
    tree.back_up(1, 2, 3, 4)
    tree.evict(Tier.DEVICE, 4)
    tree.put(5, 6)
    tree.put(7, 8, 9, 10)
    reader = tree.cache.lock(tree.match(7, 8, 9, 10).last_device_node)
    taken = take(tree.device, 1)
    assert tree.device.free_pages + tree.cache.evictable_pages == 3
    assert tree.cache.transfers.begin_restore(tree.match(1, 2, 3, 4)) is None
    tree.check()
    assert tree.match(5, 6).matched_tokens == 2
    tree.cache.release(reader)
    tree.device.free(taken)


def test_a_copy_that_ends_early_leaves_no_lock_on_the_copies_above_it() -> None:
    """What was copied before is the path on which the new copy would have stood."""
    tree = Tree()
    tree.put(1, 2)
    tree.back_up(1, 2)
    tree.put(1, 2, 3, 4)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 3, 4).last_device_node)
    assert copy is not None
    assert tree.cache.host_protected_pages == 2
    tree.cache.transfers.abort_offload(copy)
    assert tree.cache.host_protected_pages == 0
    tree.evict(Tier.HOST, 2)


def test_a_request_goes_from_one_lock_to_the_next_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, what is protected only grows: each lock is taken before the one before it ends."""
    protected: list[int] = []
    right = PageAccounts.release

    def release(accounts: PageAccounts, receipt: LockReceipt) -> None:
        right(accounts, receipt)
        protected.append(accounts.protected_pages)

    monkeypatch.setattr(PageAccounts, "release", release)
    bench = Bench(chunk=2)
    bench.submit("one", [1, 2, 3, 4, 5, 6], max_tokens=1)
    bench.run()
    assert protected[:3] == [2, 4, 6]
