"""Requests straight against the radix cache with all that it has, over a canary pool per tier.

Tenants share public prefixes and keep their tails to themselves; copies between the tiers take a random number of rounds and
fail now and then; pins come, expire and go; owners have floors and ceilings; the cache is flushed with all of that under way.
Every KV that a request would read is read, every copy reads its source when it ends and not when it begins, and now and then the
whole tree is read, on both tiers.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from prefixmesh.cache.base import LockReceipt, MatchResult, PageIndices, RadixKey
from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.pin import Pin, PinBudget
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Copy, Fetch, HostRead, Offload, Restore
from prefixmesh.errors import BudgetError
from tests.support.canary_cache import CanaryCache
from tests.support.canary_elsewhere import CanaryArrival, CanaryReading
from tests.support.canary_pool import CanaryAllocator, CanaryCopy, CanaryError, CanaryPool, Chain
from tests.support.canary_tier_prompts import TENANTS, TierPrompts, cut

BLOCK_PAGES: Final = 2
LONGEST_PAGES: Final = 24
"""Of a prompt; a pool holds a handful of those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierOptions:
    """How much of what."""

    requests: int
    seed: int = 1
    page_size: int = 1
    device_pages: int = 64
    host_pages: int = 100
    policy: EvictionPolicy = "lru"
    max_running: int = 7
    flush_rate: float = 0.004
    """Per round, as all rates."""

    pin_rate: float = 0.2
    abort_rate: float = 0.1
    fetch_rate: float = 0.1
    """Of all requests, those whose KV is brought from elsewhere."""

    read_rate: float = 0.3
    """Of all backups, those that are then read for elsewhere."""

    copy_failure: float = 0.2
    """Of all copies, those that fail."""

    check_every: int = 40
    """Rounds between two recomputations of all invariants, each with a reading of the whole tree."""


@dataclass(slots=True, eq=False)
class Visit:
    """One request: what it wants, what it has."""

    number: int
    key: RadixKey
    chain: Chain
    owner: str
    table: PageIndices
    pages: int = 0
    shared: int = 0
    """Pages of the cache at the front of the table; the rest are its own."""

    computed: int = 0
    receipt: LockReceipt | None = None
    waiting: bool = False
    """For a restore."""

    seen: PageIndices = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    generations: np.ndarray[tuple[int], np.dtype[np.int64]] = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64)
    )


@dataclass(slots=True, eq=False)
class Flight:
    """One copy: the cache's job and the canary's copy of it."""

    job: Copy
    copy: CanaryCopy | CanaryArrival | CanaryReading
    rounds: int
    fails: bool
    visit: Visit | None
    """Who waits for it."""


class TierRun:
    """One cache, two canary pools, one seed. ``counts`` says what happened."""

    def __init__(self, options: TierOptions) -> None:
        self.options = options
        size = options.page_size
        self.device = CanaryPool(options.device_pages, size)
        self.host = CanaryPool(options.host_pages, size, "host")
        self.device_allocator, self.host_allocator = CanaryAllocator(self.device), CanaryAllocator(self.host)
        self.cache = CanaryCache(
            self.device_allocator,
            RadixOptions(
                host=self.host_allocator,
                policy=options.policy,
                block_size=BLOCK_PAGES * size,
                quotas={"a": Quota(floor_pages=12), "b": Quota(ceiling_pages=30)},
                pin_budget=PinBudget(pages_per_owner=16, pages_in_all=28),
                host_pin_budget=PinBudget(pages_per_owner=16, pages_in_all=28),
            ),
            host=self.host,
        )
        self.rng = random.Random(options.seed)
        self.counts: Counter[str] = Counter()
        self.visits: list[Visit] = []
        self.flights: list[Flight] = []
        self.now = 0.0
        self.prompts = TierPrompts(
            random.Random(options.seed + 1), size, BLOCK_PAGES * size, LONGEST_PAGES * size
        )
        self._last = self.prompts.ask()

    def serve(self) -> None:
        """All requests, from the first match to the last release."""
        rounds = 0
        while self.counts["requests"] < self.options.requests or self.visits or self.flights:
            rounds += 1
            self._arrive()
            for visit in list(self.visits):
                if not visit.waiting and self.rng.random() < 0.6:
                    self._advance(visit)
            self._land()
            self._disturb()
            if rounds % self.options.check_every == 0:
                self.check()

    def check(self) -> None:
        """Invariants, the pages' owners, and what every page of the tree holds."""
        self.cache.check_invariants()
        self.counts["tree reads"] += 1
        self.cache.read_tree()

    def hit_rates(self) -> tuple[float, float]:
        """Shares of what was asked for that either tier had when it was: in the first half of all requests, and in the second."""
        counts = self.counts
        first = counts["found by the first half"] / counts["asked by the first half"]
        return first, counts["found by the second half"] / counts["asked by the second half"]

    def settle(self) -> None:
        """All have ended: without pins nothing is protected, and everything can be evicted from both tiers."""
        self.cache.pins.expire(self.now)
        left = sum(len(self.cache.pins_on(tier)) for tier in Tier)
        self.counts["expired pins"] = self.counts["pins"] - self.counts["unpins"] - left
        for tier in Tier:
            pins = self.cache.pins_on(tier)
            for key, owner in list(pins.pins):
                pins.remove(key, owner, self.now)
        self.check()
        cache, total = self.cache, self.options.device_pages + self.options.host_pages
        assert (cache.pinned_pages, cache.host_protected_pages, cache.double_releases) == (0, 0, 0)
        for owner in ("", *TENANTS):
            cache.evict(total, owner)
            cache.evict_host(total, owner)
        assert self.device_allocator.free_pages == self.device.free_pages == self.device.total_pages
        assert self.host_allocator.free_pages == self.host.free_pages == self.host.total_pages
        self.check()

    # What a request does.

    def _arrive(self) -> None:
        """One request, or the same one several times."""
        while len(self.visits) < self.options.max_running and self.counts["requests"] < self.options.requests:
            key, owner = self._last
            if self.rng.random() < 0.6:
                key, owner = self._last = self.prompts.ask()
            self.counts["requests"] += 1
            self.counts["public"] += key.boundary_tokens > 0
            chain = Chain.of_key(key)
            table = np.zeros(self._pages_for(chain.length), dtype=np.int32)
            visit = Visit(self.counts["requests"], key, chain, owner, table)
            self.visits.append(visit)
            half = 2 * self.counts["requests"] > self.options.requests
            found = self.cache.peek_tiers(key)
            self.counts["found by the second half" if half else "found by the first half"] += sum(found)
            self.counts["asked by the second half" if half else "asked by the first half"] += chain.length
            self._begin(visit)

    def _begin(self, visit: Visit) -> None:
        """Match and lock; where the host has more, mostly wait until it is back."""
        whole = (visit.chain.length - 1) // self.options.page_size * self.options.page_size
        key = cut(visit.key, whole)
        match = self.cache.match_prefix(key, self._tick(), self.rng.randint(0, 2))
        old, visit.receipt = visit.receipt, self.cache.lock(match.last_device_node)
        if old is not None:
            self.cache.release(old)
        if self._restore(visit, match) or self._fetch(visit, key, match):
            visit.waiting = True
            if self.rng.random() < 0.5:  # who waits need not hold anything: the copy does
                self._release(visit)
            return
        matched = len(match.device_indices)
        visit.table[:matched] = match.device_indices
        visit.pages = visit.shared = matched
        visit.computed = match.matched_tokens
        self.counts["matched tokens"] += match.matched_tokens

    def _restore(self, visit: Visit, match: MatchResult) -> bool:
        """Bring back what the host has, or a part of it; not always, and not where there is no room."""
        if not match.host_hit_length or self.rng.random() >= 0.8:
            return False
        tokens = self.rng.choice((None, self.rng.randint(0, match.host_hit_length)))
        restore = self.cache.transfers.begin_restore(match, visit.owner, tokens)
        if restore is None:
            self.counts["restores without room"] += 1
            return False
        self.counts["restores"] += 1
        copy = CanaryCopy(self.host, restore.host_pages, self.device, restore.device_pages)
        self._fly(restore, copy, visit)
        return True

    def _fetch(self, visit: Visit, key: RadixKey, match: MatchResult) -> bool:
        """Bring KV from elsewhere that the device has not."""
        if self.rng.random() >= self.options.fetch_rate:
            return False
        wanted = self.rng.randint(1, LONGEST_PAGES * self.options.page_size)
        fetch = self.cache.transfers.begin_fetch(key, match, wanted, visit.owner)
        if fetch is None:
            return False
        self.counts["fetches"] += 1
        copy = CanaryArrival(self.device, fetch.device_pages, visit.chain, fetch.start)
        self._fly(fetch, copy, visit)
        return True

    def _advance(self, visit: Visit) -> None:
        """Compute a chunk, read everything, perhaps share it; the last chunk ends the request."""
        end = min(visit.chain.length, visit.computed + self.rng.randint(1, 5 * self.options.page_size))
        missing = self._pages_for(end) - visit.pages
        fresh = self._take(missing, visit.owner)
        if fresh is None:
            self._preempt(visit)
            return
        visit.table[visit.pages : visit.pages + missing] = fresh
        visit.pages += missing
        slots = self.device.slots(visit.table[: visit.pages])
        start, visit.computed = visit.computed, end
        self.device.write(slots[start:end], visit.chain.rows(start, end), visit.number)
        self._read(visit, slots[:end])
        if end == visit.chain.length:
            self._end(visit, keep=True)
        elif self.rng.random() < 0.5:
            self._commit(visit)

    def _read(self, visit: Visit, slots: np.ndarray[tuple[int], np.dtype[np.integer]]) -> None:
        self.device.read(slots, visit.chain.rows(0, len(slots)), visit.number)
        pages = visit.table[: visit.pages].copy()
        generations, known = self.device.generations[pages], len(visit.seen)
        if ((pages[:known] == visit.seen) & (generations[:known] != visit.generations)).any():
            raise CanaryError(f"a page of request {visit.number} was freed while it ran")
        visit.seen, visit.generations = pages, generations

    def _commit(self, visit: Visit) -> None:
        """As ``KvManager.commit``; but pages that a flush cut off are offered, and refused."""
        whole = visit.computed // self.options.page_size
        if whole <= visit.shared or visit.receipt is None:
            return
        key = cut(visit.key, whole * self.options.page_size)
        result = self.cache.insert(
            key,
            visit.table[:whole].copy(),
            self._tick(),
            priority=self.rng.randint(0, 2),
            owner=visit.owner,
        )
        kept = len(result.device_indices)
        self.counts["refused after a flush"] += kept == 0
        visit.table[:kept] = result.device_indices
        visit.shared = max(visit.shared, kept)
        fresh = self.cache.lock(result.last_device_node)
        self._release(visit)
        visit.receipt = fresh
        if self.rng.random() < 0.6:
            self._offload(visit)

    def _offload(self, visit: Visit) -> None:
        """Write-through of what the visit has locked."""
        assert visit.receipt is not None
        node = visit.receipt.node
        offload = None if node is None or node.parent is None else self.cache.transfers.begin_offload(node)
        if offload is not None:
            self.counts["offloads"] += 1
            copy = CanaryCopy(self.device, offload.device_pages, self.host, offload.host_pages)
            self._fly(offload, copy, None)

    def _preempt(self, visit: Visit) -> None:
        """No page to be had: give up what is one's own, and come back."""
        self.counts["preemptions"] += 1
        self._give_back(visit, keep=True)
        self._begin(visit)

    def _end(self, visit: Visit, *, keep: bool) -> None:
        self._give_back(visit, keep=keep)
        self.visits.remove(visit)
        if keep and self.rng.random() < 0.3:
            self.prompts.learn(visit.chain.tokens.tolist())

    def _give_back(self, visit: Visit, *, keep: bool) -> None:
        if keep:
            self._commit(visit)
        private = visit.table[visit.shared : visit.pages].copy()
        visit.pages = visit.shared = visit.computed = 0
        visit.seen, visit.generations = visit.seen[:0], visit.generations[:0]
        self._release(visit)
        self.device_allocator.free(private)

    def _release(self, visit: Visit) -> None:
        receipt, visit.receipt = visit.receipt, None
        if receipt is not None:
            self.cache.release(receipt)

    def _take(self, count: int, owner: str) -> PageIndices | None:
        missing = count - self.device_allocator.free_pages
        if missing > 0:
            self.counts["evicted pages"] += self.cache.evict(missing, owner)
        return self.device_allocator.allocate(count)

    # Copies.

    def _fly(self, job: Copy, copy: CanaryCopy | CanaryArrival | CanaryReading, visit: Visit | None) -> None:
        fails = self.rng.random() < self.options.copy_failure
        self.flights.append(Flight(job, copy, self.rng.randint(0, 6), fails, visit))

    def _land(self) -> None:
        """Copies end in any order; the bytes first, then the cache is told, then who waited goes on."""
        self.rng.shuffle(self.flights)
        for flight in list(self.flights):
            flight.rounds -= 1
            if flight.rounds < 0:
                self.flights.remove(flight)
                self._acknowledge(flight)
                if flight.visit is not None and flight.visit in self.visits:
                    flight.visit.waiting = False
                    self._begin(flight.visit)

    def _acknowledge(self, flight: Flight) -> None:
        transfers, job = self.cache.transfers, flight.job
        if flight.fails:
            self.counts["failed copies"] += 1
            flight.copy.cancel()
        else:
            flight.copy.finish()
        match job:
            case Offload():
                node = job.node
                (transfers.abort_offload if flight.fails else transfers.finish_offload)(job)
                self._read_backup(node)
            case Restore():
                (transfers.fail_restore if flight.fails else transfers.finish_restore)(job)
            case Fetch() if flight.fails:
                transfers.fail_fetch(job)
            case Fetch():
                transfers.finish_fetch(job, self._tick())
            case HostRead():
                transfers.end_read(job)

    def _read_backup(self, node: TreeNode | None) -> None:
        """Now and then, what has just been backed up is read for elsewhere."""
        if node is None or self.rng.random() >= self.options.read_rate:
            return
        read = self.cache.transfers.begin_read(node)
        if read is not None:
            self.counts["reads"] += 1
            self._fly(read, CanaryReading(self.host, read.host_pages, Chain.of_key(read.key)), None)

    # What else happens.

    def _disturb(self) -> None:
        rng, options = self.rng, self.options
        if self.visits and rng.random() < options.abort_rate:
            self.counts["aborts"] += 1
            visit = rng.choice(self.visits)
            self.counts["aborts while restoring"] += visit.waiting
            self._end(visit, keep=rng.random() < 0.5)
        if rng.random() < options.pin_rate:
            self._pin()
        if rng.random() < options.flush_rate:
            self.counts["flushes"] += 1
            self.counts["flushes in flight"] += bool(self.flights)
            self.cache.flush()
        if rng.random() < 0.02:
            self.cache.evict(rng.randint(1, 40), rng.choice(("", "a", "b")))
        if rng.random() < 0.02:
            self.cache.evict_host(rng.randint(1, 40), rng.choice(("", "a", "b")))

    def _pin(self) -> None:
        """Pin, unpin, or read what is pinned, on either tier: of that nothing may be missing."""
        tier, rng = self.rng.choice((Tier.DEVICE, Tier.DEVICE, Tier.HOST)), self.rng
        pins = self.cache.pins_on(tier)
        pins.expire(self._tick())
        if pins.pins and rng.random() < 0.3:
            pins.remove(*rng.choice(list(pins.pins)), self.now)
            self.counts["unpins"] += 1
        if pins.pins:
            self._read_pinned(rng.choice(list(pins.pins.values())))
        if rng.random() < 0.6:
            key, owner = self.prompts.ask()
            before = len(pins)
            try:
                pins.add(key, owner, self.now, rng.choice((None, 20.0, 150.0)))
                self.counts["pins"] += len(pins) - before  # else it was renewed
            except BudgetError:
                self.counts["pins beyond budget"] += 1

    def _read_pinned(self, pin: Pin) -> None:
        """What a pin holds is matched, and read by that; on the host it may be on the device too."""
        held = pin.status().held_tokens
        self.counts["pinned tokens read"] += held
        match = self.cache.match_prefix(pin.key, self.now)
        found = match.matched_tokens + (match.host_hit_length if pin.tier is Tier.HOST else 0)
        assert found >= held
        if pin.tier is Tier.HOST:
            self.counts["tokens pinned on the host"] += held

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.options.page_size)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now
