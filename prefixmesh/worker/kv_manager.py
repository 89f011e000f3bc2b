"""Who owns which KV page: the one place where a running request takes pages, shares them and gives them back.

A page belongs to the allocator's free list, to the prefix cache, or to one request's private tail (see the drawing in
``request``). Everything that ends or interrupts a request goes through ``release``. With a host tier, a ``Keeper`` is told what was inserted
and found, and brings back what only the host has. Pure: no clock, no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from prefixmesh.cache.base import MatchResult, PageIndices, PrefixCache, RadixKey
from prefixmesh.cache.factory import block_size_of, miss_finder
from prefixmesh.cache.ledger import Lookup, Misses
from prefixmesh.cache.misses import last_fingerprint
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.public import PublicPrefix, choose_key
from prefixmesh.errors import DoubleReleaseError, InternalError, InvariantError
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.request import Request
from prefixmesh.worker.tiers.backups_in_flight import LATE_COPY_S
from prefixmesh.worker.tiers.keeper import Keeper
from prefixmesh.worker.tiers.load_backs import Load


class HeldAlone(NamedTuple):
    """What one request holds and nobody else does."""

    pages: int
    """Pages that could be had if it gave up all."""

    computed_tokens: int
    """Tokens whose KV is complete in them."""


class KvManager:
    """Moves pages between the free list, the prefix cache and requests."""

    def __init__(self, allocator: PageAllocator, cache: PrefixCache, keeper: Keeper | None = None) -> None:
        """``keeper`` is the cache's host tier's; None where it has none."""
        self._allocator = allocator
        self._cache = cache
        self._keeper = keeper
        self._misses = miss_finder(cache)
        self._block_size = block_size_of(cache)
        self.page_size = cache.page_size
        self._flushes = 0
        self.receipts_out = 0
        """Locks that requests hold."""

        self._evicted_pages = 0
        """For what requests compute."""

    @property
    def total_pages(self) -> int:
        """Size of the pool."""
        return self._allocator.total_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.free_pages

    @property
    def evictable_pages(self) -> int:
        """Cached pages that nothing locks."""
        return self._cache.evictable_pages

    @property
    def protected_pages(self) -> int:
        """Cached pages that a lock protects, or somebody's floor."""
        return self._cache.protected_pages

    @property
    def evicted_pages(self) -> int:
        """Cached pages that were given up for others, since the start: for what they compute, and for what copies bring them."""
        return self._evicted_pages + (0 if self._keeper is None else self._keeper.evicted_pages)

    @property
    def flushes(self) -> int:
        """How often the cache was emptied."""
        return self._flushes

    @property
    def copying_pages(self) -> int:
        """Device pages that copies in flight own. O(copies)."""
        return 0 if self._keeper is None else self._keeper.copying_pages

    @property
    def double_releases(self) -> int:
        """Lock receipts that were released twice: bugs that were survived."""
        return self._cache.double_releases

    def obtainable_pages(self, owner: str) -> int:
        """Pages that an allocation for ``owner`` could get, by evicting if need be; it may turn out that it gets fewer, see
        ``PrefixCache.evictable_for``."""
        return self._allocator.free_pages + self._cache.evictable_for(owner)

    def pages_for(self, size_tokens: int) -> int:
        """Pages that hold ``size_tokens`` tokens."""
        return -(-size_tokens // self.page_size)

    def place(self, request: Request, candidates: Sequence[PublicPrefix]) -> None:
        """Choose, for its life, where the KV of a request that comes is to live: in its own namespace, or behind one of the public prefixes.
        Changes nothing in the cache. O(length) for each candidate."""
        key = choose_key(
            self._cache.peek if self._keeper is None else self._keeper.peek,
            request.namespace,
            request.ids[: request.length].tobytes(),
            candidates,
            page_size=self.page_size,
            block_size=self._block_size,
        )
        request.live_under(key)

    def peek(self, request: Request) -> int:
        """Tokens that an admission now would not compute: found on the device, or loaded back; changes nothing."""
        key = request.match_key(self.page_size)
        if self._keeper is None or not request.may_load:
            return self._cache.peek(key)
        return self._keeper.peek(key)

    def admit(self, request: Request, reserve_pages: int, now: float) -> bool:
        """Match and lock the cached prefix, and take pages for every other known token; False when ``reserve_pages`` would
        not be left beside them, in which case the request owns nothing. Match and lock are one step, so nothing can evict
        between them. A request's first admission is counted in the ledger.

        What only the host has is loaded back where that is worth it: then ``request.load`` says so, and its pages belong to the copy until
        ``loaded``, which the ledger waits for as well.
        """
        owner, key = request.owner, request.match_key(self.page_size)
        wanted = self.pages_for(request.length)
        if wanted + reserve_pages - self._cache.peek(key) // self.page_size > self.obtainable_pages(owner):
            return False  # asked first, so that a request that must wait leaves access times alone
        if self._waits_for_rescue(request, key, now):
            return False
        match = self._cache.match_prefix(key, now, request.priority)
        self._lock(request, match.last_device_node)
        matched_pages = len(match.device_indices)
        needed = wanted - matched_pages
        lookup: Lookup | None = None
        load: Load | None = None
        fresh: PageIndices | None = None
        if needed + reserve_pages <= self.obtainable_pages(owner):
            if request.query.is_open:
                lookup = self._explain(request, key, match)  # before anything is evicted for this request
            load = self._begin_load(request, match, now)
            fresh = self._take_pages({owner: needed - (0 if load is None else len(load.copy.device_pages))})
        if fresh is None:  # or the cache has promised too much
            if load is not None and self._keeper is not None:
                self._keeper.undo(load)
            self._release_receipt(request)
            return False
        request.page_table[:matched_pages] = match.device_indices
        request.shared_pages = matched_pages
        request.pages = wanted
        request.matched_tokens = request.computed = match.matched_tokens
        request.loaded_tokens = 0
        request.lookup = lookup
        request.admitted_after_flushes = self._flushes
        request.rescue_until = None
        if self._keeper is not None:
            self._tell(self._keeper, request, match, load)
        request.page_table[request.own_from : wanted] = fresh
        if load is None:
            self._count(request)
        return True

    def loaded(self, request: Request, now: float) -> None:
        """What a request was loading is in the tree: hold it there as any match, and count it. To be called before anything can be
        evicted. O(depth + pages)."""
        load, end = request.load, request.own_from
        match = self._cache.match_prefix(request.key(end * self.page_size), now, request.priority)
        if load is None or len(match.device_indices) != end:
            raise InternalError(
                f"{len(match.device_indices)} of {end} pages are there after a load-back of {load!r}"
            )
        request.page_table[:end] = match.device_indices
        request.loaded_tokens = load.size_tokens
        request.matched_tokens = end * self.page_size
        request.shared_pages, request.loading_pages, request.load = end, 0, None
        self._lock(request, match.last_device_node)
        self._count(request)

    def extend(self, requests: list[Request]) -> bool:
        """One more page for each of ``requests``, or for none of them and False. Evicts as needed."""
        if not requests:
            return True
        fresh = self._take_pages(Counter(request.owner for request in requests))
        if fresh is None:
            return False
        for request, page in zip(requests, fresh.tolist(), strict=True):
            request.page_table[request.pages] = page
            request.pages += 1
        return True

    def take_pages(self, count: int, owner: str) -> PageIndices | None:
        """Pages for KV that comes from elsewhere, on ``owner``'s account; None, and nothing evicted, when not all can be had. Once they are
        cached, whoever runs may have them back."""
        return self._take_pages({owner: count}) if count <= self.obtainable_pages(owner) else None

    def give_back(self, pages: PageIndices) -> None:
        """Pages that were taken, and hold nothing."""
        self._allocator.free(pages)

    def commit(self, request: Request, now: float) -> None:
        """Share what is complete: insert the computed tokens' whole pages, and hold them by a lock.

        Where another request cached the same tokens first, this one's duplicates are freed by the insert and the shared
        pages take their place in the page table before anything else is allocated.
        """
        complete_pages = request.computed // self.page_size
        if complete_pages <= request.shared_pages or request.admitted_after_flushes != self._flushes:
            return
        if request.load is not None:
            return  # what stands before its own pages is not complete
        result = self._cache.insert(
            request.key(complete_pages * self.page_size),
            request.page_table[:complete_pages].copy(),
            now,
            priority=request.priority,
            owner=request.owner,
        )
        kept = len(result.device_indices)
        if not kept:
            return  # less than the cache keeps
        if kept < request.shared_pages:
            raise InternalError(f"an insert forgot locked pages: {kept} of {request.shared_pages} are left")
        request.page_table[:kept] = result.device_indices
        request.shared_pages = kept
        self._lock(request, result.last_device_node)
        if self._keeper is not None:
            self._keeper.inserted(result.last_device_node)

    def release(self, request: Request, *, keep: bool, now: float) -> None:
        """Give back all that a running request owns; the one path of finish, abort, failure and preemption.

        ``keep`` leaves the complete KV in the cache, where the next turn (or the resumption) finds it; without it only what
        was committed before stays.
        """
        if keep:
            self.commit(request, now)
        private = request.page_table[request.own_from : request.pages].copy()
        if request.load is not None and self._keeper is not None:
            self._keeper.leave(request.load)
        request.load = request.lookup = None
        request.pages = request.shared_pages = request.loading_pages = request.computed = 0
        self._release_receipt(request)
        if len(private):
            self._allocator.free(private)

    def flush(self) -> None:
        """Empty the cache. Running requests keep what they hold until they release it; nothing of what they computed until now,
        shared or not, enters the cache again."""
        self._cache.flush()
        self._flushes += 1
        if self._keeper is not None:
            self._keeper.flushed()

    def save(self, request: Request, now: float) -> None:
        """Copy to the host what a running request has computed, if that is worth it: its pages are about to be wanted by others."""
        if self._keeper is not None and request.load is None:
            self.commit(request, now)
            node = None if request.receipt is None else request.receipt.node
            if node is not None and self.offers(request):
                self._keeper.rescues.save(node, now)

    def may_free_pages(self, now: float) -> bool:
        """Whether copies are in flight whose ends may give pages back. O(copies)."""
        return self._keeper is not None and self._keeper.may_free_pages(now)

    def pages_coming(self, now: float) -> int:
        """Pages that could be had in a moment, once copies in flight have ended. O(copies * depth)."""
        return 0 if self._keeper is None else self._keeper.pages_coming(now)

    def offers(self, request: Request) -> bool:
        """Whether what a running request computes enters the cache; after a flush it does not."""
        return request.admitted_after_flushes == self._flushes

    def held_alone(self, request: Request) -> HeldAlone:
        """What nobody else would keep if a running request gave up everything: its private pages, and those of its cached prefix
        that its lock alone protects. O(depth)."""
        pages = request.private_pages
        tokens = max(0, request.computed - request.own_from * self.page_size)
        node = None if request.receipt is None else request.receipt.node
        # Locks are counted along the path, so whoever holds part of it holds all before that part.
        while node is not None and node.lock_ref == 1:
            pages += len(node.value)
            tokens += len(node.key) // TOKEN_BYTES
            node = node.parent
        return HeldAlone(pages, tokens)

    def check_invariants(self, private: PageIndices) -> None:
        """The allocator's and the cache's own invariants, and that no ``private`` page is free. O(pool)."""
        self._allocator.check_invariants()
        self._cache.check_invariants()
        both = np.intersect1d(self._allocator.listing(), private)
        if len(both):
            raise InvariantError(f"pages of a request are free: {both.tolist()}")

    def _take_pages(self, wanted: Mapping[str, int]) -> PageIndices | None:
        """Pages for each owner, of which it is told only how many; None when not all can be had. What is not free is evicted,
        on behalf of each owner at most what it wants itself: nobody gives up its own below its floor for others."""
        count = sum(wanted.values())
        missing = count - self._allocator.free_pages
        for owner, pages in wanted.items():
            if missing <= 0:
                break
            evicted = self._cache.evict(min(missing, pages), owner)
            self._evicted_pages += evicted
            missing -= evicted
        return self._allocator.allocate(count)

    def _waits_for_rescue(self, request: Request, key: RadixKey, now: float) -> bool:
        """Whether what would be evicted for a request is being saved first; it waits once for that, and no longer than a copy may take."""
        if self._keeper is None:
            return False
        missing = self.pages_for(request.length) - self._cache.peek(key) // self.page_size - self.free_pages
        if missing <= 0:
            return False
        if request.rescue_until is None:
            request.rescue_until = now + LATE_COPY_S
        return now < request.rescue_until and self._keeper.rescues.make_room(key, missing, now)

    def _begin_load(self, request: Request, match: MatchResult, now: float) -> Load | None:
        if self._keeper is None or not request.may_load:
            return None
        return self._keeper.begin_load(match, request.owner, now)

    def _tell(self, keeper: Keeper, request: Request, match: MatchResult, load: Load | None) -> None:
        """What an admission found, and what becomes of it: ``load`` brings what only the host has, or it is computed."""
        keeper.matched(match)
        brought = 0
        if load is not None:
            brought = load.size_tokens
            request.load, request.loading_pages = load, len(load.copy.device_pages)
            request.page_table[request.shared_pages : request.own_from] = load.copy.device_pages
            request.computed += brought
            keeper.start(load)
        keeper.computed(match.host_hit_length - brought)
        if request.lookup is not None:
            request.lookup = _without_host(request.lookup, match.host_hit_length - brought)

    def _count(self, request: Request) -> None:
        lookup, request.lookup = request.lookup, None
        if lookup is not None:
            request.query.record(lookup)

    def _explain(self, request: Request, key: RadixKey, match: MatchResult) -> Lookup:
        from_disk = request.fetched.within(match.matched_tokens)
        return self._misses.explain(
            key,
            request.length,
            match.matched_tokens - from_disk,
            match.host_hit_length,
            last_fingerprint(match.last_host_node),
            from_disk,
        )

    def _lock(self, request: Request, node: TreeNode) -> None:
        """Protect the path to ``node`` instead of what the request held. The new lock comes first: between the two nothing
        that both hold is ever unprotected."""
        fresh = self._cache.lock(node)
        self._release_receipt(request)
        request.receipt = fresh
        self.receipts_out += 1

    def _release_receipt(self, request: Request) -> None:
        receipt, request.receipt = request.receipt, None
        if receipt is None:
            return
        self.receipts_out -= 1
        with suppress(DoubleReleaseError):  # the cache counts it; nothing has changed
            self._cache.release(receipt)


def _without_host(lookup: Lookup, size_tokens: int) -> Lookup:
    """A look-up of which so many tokens that only the host has are computed: they are missed as evicted ones are, for more room on the
    device would have helped."""
    never_seen, evicted, elsewhere, tail = lookup.misses
    misses = Misses(never_seen, evicted + size_tokens, elsewhere, tail)
    return lookup._replace(host_tokens=lookup.host_tokens - size_tokens, misses=misses)
