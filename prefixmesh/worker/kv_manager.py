"""Who owns which KV page: the one place where a running request takes pages, shares them and gives them back.

A page belongs to the allocator's free list, to the prefix cache, or to one request's private tail (see the drawing in
``request``). Everything that ends or interrupts a request goes through ``release``. Pure: no clock, no torch.
"""

from contextlib import suppress

import numpy as np

from prefixmesh.cache.base import PageIndices, PrefixCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.errors import DoubleReleaseError, InternalError, InvariantError
from prefixmesh.worker.request import Request


class KvManager:
    """Moves pages between the free list, the prefix cache and requests."""

    def __init__(self, allocator: PageAllocator, cache: PrefixCache) -> None:
        self._allocator = allocator
        self._cache = cache
        self.page_size = cache.page_size

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
        """Cached pages that a lock protects."""
        return self._cache.protected_pages

    @property
    def double_releases(self) -> int:
        """Lock receipts that were released twice: bugs that were survived."""
        return self._cache.double_releases

    @property
    def obtainable_pages(self) -> int:
        """Pages that an allocation could get, by evicting if need be."""
        return self._allocator.free_pages + self._cache.evictable_pages

    def pages_for(self, size_tokens: int) -> int:
        """Pages that hold ``size_tokens`` tokens."""
        return -(-size_tokens // self.page_size)

    def peek(self, request: Request) -> int:
        """Tokens that an admission would find cached now; changes nothing."""
        return self._cache.peek(request.match_key(self.page_size))

    def admit(self, request: Request, reserve_pages: int, now: float) -> bool:
        """Match and lock the cached prefix, and take pages for every other known token; False when ``reserve_pages`` would
        not be left beside them, in which case the request owns nothing. Match and lock are one step, so nothing can evict
        between them."""
        needed_at_most = self.pages_for(request.length) + reserve_pages
        if needed_at_most - self.peek(request) // self.page_size > self.obtainable_pages:
            return False  # asked first, so that a request that must wait leaves access times alone
        match = self._cache.match_prefix(request.match_key(self.page_size), now)
        request.receipt = self._cache.lock(match.last_device_node)
        matched_pages = len(match.device_indices)
        needed = self.pages_for(request.length) - matched_pages
        if needed + reserve_pages > self.obtainable_pages:
            self._release_receipt(request)
            return False
        fresh = self._take_pages(needed)
        if fresh is None:
            self._release_receipt(request)
            raise InternalError(f"{needed} pages were promised and are not there")
        request.page_table[:matched_pages] = match.device_indices
        request.page_table[matched_pages : matched_pages + needed] = fresh
        request.shared_pages = matched_pages
        request.pages = matched_pages + needed
        request.matched_tokens = request.computed = match.matched_tokens
        request.detached = False
        return True

    def extend(self, requests: list[Request]) -> bool:
        """One more page for each of ``requests``, or for none of them and False. Evicts as needed."""
        if not requests:
            return True
        fresh = self._take_pages(len(requests))
        if fresh is None:
            return False
        for request, page in zip(requests, fresh.tolist(), strict=True):
            request.page_table[request.pages] = page
            request.pages += 1
        return True

    def commit(self, request: Request, now: float) -> None:
        """Share what is complete: insert the computed tokens' whole pages, and hold them by a lock.

        Where another request cached the same tokens first, this one's duplicates are freed by the insert and the shared
        pages take their place in the page table before anything else is allocated.
        """
        complete_pages = request.computed // self.page_size
        if request.detached or complete_pages <= request.shared_pages:
            return  # nothing new is complete, or it may not be offered: the tail stays private
        key = request.key(complete_pages * self.page_size)
        result = self._cache.insert(key, request.page_table[:complete_pages].copy(), now)
        kept = len(result.device_indices)
        if kept < request.shared_pages:
            raise InternalError(f"an insert forgot locked pages: {kept} of {request.shared_pages} are left")
        request.page_table[:kept] = result.device_indices
        request.shared_pages = kept
        # The new lock first: between the two nothing of the path is ever unprotected.
        fresh = self._cache.lock(result.last_device_node)
        self._release_receipt(request)
        request.receipt = fresh

    def release(self, request: Request, *, keep: bool, now: float) -> None:
        """Give back all that a running request owns; the one path of finish, abort, failure and preemption.

        ``keep`` leaves the complete KV in the cache, where the next turn (or the resumption) finds it; without it only what
        was committed before stays.
        """
        if keep:
            self.commit(request, now)
        private = request.page_table[request.shared_pages : request.pages].copy()
        request.pages = request.shared_pages = request.computed = 0
        self._release_receipt(request)
        if len(private):
            self._allocator.free(private)

    def flush(self, running: list[Request]) -> None:
        """Empty the cache. Running requests keep what they hold until they release it, but may not offer it again."""
        self._cache.flush()
        for request in running:
            request.detached = request.detached or request.shared_pages > 0

    def check_invariants(self, private: PageIndices) -> None:
        """The allocator's and the cache's own invariants, and that no ``private`` page is free. O(pool)."""
        self._allocator.check_invariants()
        self._cache.check_invariants()
        both = np.intersect1d(self._allocator.listing(), private)
        if len(both):
            raise InvariantError(f"pages of a request are free: {both.tolist()}")

    def _take_pages(self, count: int) -> PageIndices | None:
        missing = count - self._allocator.free_pages
        if missing > 0:
            self._cache.evict(missing)
        return self._allocator.allocate(count)

    def _release_receipt(self, request: Request) -> None:
        receipt, request.receipt = request.receipt, None
        if receipt is None:
            return
        with suppress(DoubleReleaseError):  # the cache counts it; nothing has changed
            self._cache.release(receipt)
