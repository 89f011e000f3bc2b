"""F38: any order of operations leaves the invariants true and the answers of a naive model.

Requests live as a scheduler lets them live: match and lock in one step, pages of their own for what is not cached, inserts in
chunks, an end by finishing or aborting. Several run at once, so that duplicates, shared prefixes and splits under locks are
common; the pool is so small that eviction is too. Every page remembers which prefix was computed into it, and every page a
cache hands out is read back.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixmesh.cache.base import CacheNode, PageIndices, RadixKey
from prefixmesh.cache.hash_cache import HASH_BLOCK_SIZE, HashCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import DoubleReleaseError
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B
from tests.support.naive_cache import NaiveCache, Prefix

Tokens = tuple[int, ...]
namespaces = st.sampled_from([NS_A, NS_A, NS_B])
seldom = st.sampled_from([False] * 9 + [True])
"""For what empties the cache: oftener, there would never be much in it to go wrong."""


@dataclass(slots=True)
class Lock:
    """A receipt and what the model knows of it."""

    receipt: LockReceipt
    namespace: Namespace
    tokens: Tokens
    epoch: int


@dataclass(slots=True)
class Request:
    """A running request: its tokens with KV, its page table, and from where on the pages are its own."""

    namespace: Namespace
    tokens: Tokens
    table: list[int]
    own_from: int
    lock: Lock

    @property
    def own(self) -> list[int]:
        """Pages that only this request knows."""
        return self.table[self.own_from :]


class CacheMachine(RuleBasedStateMachine):
    """Every operation of a prefix cache, in any order, beside the naive model."""

    page_size = 1
    unit = 1
    """Tokens that are kept or dropped together: a page, or a block."""
    total_pages = 20
    max_units = 8

    def make(self, allocator: PageAllocator) -> RadixCache | HashCache:
        """The cache under test."""
        return RadixCache(allocator, self.page_size)

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.total_pages)
        self.cache = self.make(self.allocator)
        self.model = NaiveCache(self.unit)
        self.written: dict[int, tuple[bytes, Tokens]] = {}
        """What was computed into each page: the whole prefix up to its end."""
        self.requests: list[Request] = []
        self.locks: list[Lock] = []
        self.used_receipts: list[LockReceipt] = []
        self.epoch = 0
        self.double_releases = 0
        self.now = 0.0

    @initialize(namespace=namespaces, data=st.data())
    def have_something_cached(self, namespace: Namespace, data: st.DataObject) -> None:
        """An empty cache has few ways to go wrong."""
        for _ in range(3):
            self.warm(namespace, data)

    # What requests do.

    @rule(namespace=namespaces, data=st.data())
    def begin(self, namespace: Namespace, data: st.DataObject) -> None:
        """A request arrives, locks its match and gets pages for the rest, or leaves when there are none."""
        self.start(namespace, self.draw_tokens(data))

    @rule(namespace=namespaces, data=st.data())
    def begin_two(self, namespace: Namespace, data: st.DataObject) -> None:
        """Two requests with one prompt arrive together: both compute what is not cached, and one will have duplicates."""
        tokens = self.draw_tokens(data)
        self.start(namespace, tokens)
        self.start(namespace, tokens)

    @rule(namespace=namespaces, data=st.data())
    def warm(self, namespace: Namespace, data: st.DataObject) -> None:
        """A whole prompt is computed into pages of its own and inserted, with nothing locked."""
        tokens = self.draw_tokens(data)
        pages = self.pages_for(len(tokens))
        if pages is None:
            return  # running requests hold too many
        self.now += 1
        self.write(namespace, tokens, pages, 0)
        cached = self.model.matched_tokens(namespace, tokens)
        result = self.cache.insert(RadixKey(namespace, pack(tokens)), as_array(pages), self.now)
        whole = tokens[: len(tokens) - len(tokens) % self.unit]
        assert (result.prefix_tokens, result.inserted_tokens) == (cached, len(whole))
        self.check_kv(namespace, whole, result.device_indices.tolist())
        self.model.use(namespace, whole)
        self.allocator.free(as_array(pages[len(whole) // self.page_size :]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """A running request computes another chunk."""
        request = data.draw(st.sampled_from(self.requests))
        self.compute(request, self.draw_tokens(data))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """A running request gives what it has computed to the cache and goes on."""
        self.give(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), finished=st.booleans())
    def leave(self, data: st.DataObject, finished: bool) -> None:
        """A request finishes (and inserts) or aborts (and does not); what is its own comes back."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if finished:
            self.give(request)
        self.end(request)

    # What anybody may ask.

    @rule(namespace=namespaces, data=st.data())
    def match(self, namespace: Namespace, data: st.DataObject) -> None:
        """A match that nobody locks."""
        self.checked_match(namespace, self.draw_tokens(data))

    @rule(namespace=namespaces, data=st.data())
    def peek(self, namespace: Namespace, data: st.DataObject) -> None:
        """A peek tells the model's length and leaves the drawing of the whole tree as it was."""
        tokens = self.draw_tokens(data)
        before = self.cache.render()
        peeked = self.cache.peek(RadixKey(namespace, pack(tokens)))
        assert peeked == self.model.matched_tokens(namespace, tokens)
        assert self.cache.render() == before

    @rule(namespace=namespaces, data=st.data())
    def lock(self, namespace: Namespace, data: st.DataObject) -> None:
        """A lock that outlives the step."""
        self.locks.append(self.match_and_lock(namespace, self.draw_tokens(data))[0])

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any lock ends, whatever was split since."""
        self.undo(self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1))))

    @precondition(lambda self: self.used_receipts)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """A second release raises, is counted, and changes nothing."""
        receipt = data.draw(st.sampled_from(self.used_receipts))
        before = self.cache.render()
        with pytest.raises(DoubleReleaseError):
            self.cache.release(receipt)
        self.double_releases += 1
        assert self.cache.render() == before

    @rule(pages=st.integers(0, 4))
    def evict(self, pages: int) -> None:
        """Exactly the model's pages go."""
        self.checked_evict(pages)

    @rule(now=seldom)
    def flush(self, now: bool) -> None:
        """Nothing matches any more; what is locked stays readable."""
        if not now:
            return
        self.cache.flush()
        self.epoch += 1
        self.model = NaiveCache(self.unit)

    @rule(now=seldom)
    def all_leave(self, now: bool) -> None:
        """When all have left and all is evicted, every page is free."""
        if not now:
            return
        while self.requests:
            self.end(self.requests.pop())
        while self.locks:
            self.undo(self.locks.pop())
        self.checked_evict(self.total_pages)
        assert self.allocator.free_pages == self.total_pages

    # What holds after every step.

    @invariant()
    def invariants_hold(self) -> None:
        self.cache.check_invariants()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owners = {f"request {i}": as_array(request.own) for i, request in enumerate(self.requests)}
        self.allocator.check_invariants(owners | {"cache": self.cache.owned_pages()})
        own = sum(len(request.own) for request in self.requests)
        cached = self.cache.evictable_pages + self.cache.protected_pages
        assert self.allocator.free_pages + cached + own == self.total_pages

    @invariant()
    def cached_prefixes_are_the_models(self) -> None:
        per_unit = self.unit // self.page_size
        assert self.cache.evictable_pages == self.model.unlocked_units * per_unit
        assert self.cache.protected_pages == (len(self.model.locks) + len(self.cut_off())) * per_unit
        for namespace, tokens in self.model.last_use:
            assert self.cache.peek(RadixKey(Namespace(namespace), pack(tokens))) == len(tokens)
        assert self.cache.double_releases == self.double_releases

    @invariant()
    def running_requests_read_their_own_kv(self) -> None:
        for request in self.requests:
            self.check_kv(request.namespace, request.tokens, request.table)

    # Helpers.

    def draw_tokens(self, data: st.DataObject) -> Tokens:
        """A few units, mostly one and the same, so that prefixes are shared and diverge late, also within a unit; then
        perhaps some tokens short of one."""
        same, last_differs, other = (0,) * self.unit, (*(0,) * (self.unit - 1), 1), (2,) * self.unit
        units = st.sampled_from([same, same, same, last_differs, other])
        drawn = data.draw(st.lists(units, min_size=1, max_size=self.max_units))
        rest = data.draw(st.integers(0, self.unit - 1))
        return tuple(token for unit in drawn for token in unit) + (0,) * rest

    def checked_match(self, namespace: Namespace, tokens: Tokens) -> tuple[int, list[int], CacheNode]:
        """Match, compare with the model, read every page back."""
        self.now += 1
        result = self.cache.match_prefix(RadixKey(namespace, pack(tokens)), self.now)
        assert result.matched_tokens == self.model.matched_tokens(namespace, tokens)
        assert len(result.device_indices) * self.page_size == result.matched_tokens
        self.check_kv(namespace, tokens[: result.matched_tokens], result.device_indices.tolist())
        self.model.use(namespace, tokens[: result.matched_tokens])
        return result.matched_tokens, result.device_indices.tolist(), result.last_device_node

    def match_and_lock(self, namespace: Namespace, tokens: Tokens) -> tuple[Lock, list[int]]:
        """Match and lock in one step; returns the lock and the matched pages."""
        matched, pages, node = self.checked_match(namespace, tokens)
        receipt = self.cache.lock(node)
        self.model.lock(namespace, tokens[:matched])
        return Lock(receipt, namespace, tokens[:matched], self.epoch), pages

    def undo(self, lock: Lock) -> None:
        """Release, in the model too unless a flush came between."""
        self.cache.release(lock.receipt)
        self.used_receipts.append(lock.receipt)
        if lock.epoch == self.epoch:
            self.model.release(lock.namespace, lock.tokens)

    def compute(self, request: Request, tokens: Tokens) -> bool:
        """Write KV of more tokens into pages of the request's own; False when there are none even after evicting."""
        fresh = self.pages_for(len(request.tokens) + len(tokens), have=len(request.table))
        if fresh is None:
            return False
        request.table += fresh
        request.tokens += tokens
        self.write(request.namespace, request.tokens, request.table, request.own_from)
        return True

    def start(self, namespace: Namespace, tokens: Tokens) -> None:
        """A request begins to run, or leaves when there are no pages for it."""
        lock, table = self.match_and_lock(namespace, tokens)
        request = Request(namespace, lock.tokens, table, len(table), lock)
        if self.compute(request, tokens[len(lock.tokens) :]):
            self.requests.append(request)
        else:
            self.end(request)

    def pages_for(self, tokens: int, have: int = 0) -> list[int] | None:
        """New pages for so many tokens, evicting when there are too few; None when even that does not help."""
        missing = -(-tokens // self.page_size) - have
        if missing > self.allocator.free_pages:
            self.checked_evict(missing - self.allocator.free_pages)
        fresh = self.allocator.allocate(missing)
        return None if fresh is None else fresh.tolist()

    def write(self, namespace: Namespace, tokens: Tokens, table: list[int], start: int) -> None:
        """Compute: every page from ``start`` on holds its prefix's KV now."""
        for index in range(start, len(table)):
            self.written[table[index]] = (namespace, tokens[: min((index + 1) * self.page_size, len(tokens))])

    def give(self, request: Request) -> None:
        """Insert what the request has, take the shared pages, move the lock to the new end."""
        self.now += 1
        namespace, tokens, old = request.namespace, request.tokens, request.lock
        cached = self.model.matched_tokens(namespace, tokens)
        result = self.cache.insert(RadixKey(namespace, pack(tokens)), as_array(request.table), self.now)
        # The new lock before the old one's end, so that there is no moment at which nothing protects what is read.
        receipt = self.cache.lock(result.last_device_node)
        if old.tokens and old.epoch != self.epoch:
            # A flush cut off what the request reads: none of it enters the new tree, and it stays readable.
            assert (result.prefix_tokens, result.inserted_tokens) == (0, 0)
            request.lock = Lock(receipt, namespace, old.tokens, old.epoch)
        else:
            whole = tokens[: len(tokens) - len(tokens) % self.unit]
            assert (result.prefix_tokens, result.inserted_tokens) == (cached, len(whole))
            self.model.use(namespace, whole)
            self.model.lock(namespace, whole)
            request.lock = Lock(receipt, namespace, whole, self.epoch)
        kept = result.device_indices.tolist()
        assert len(kept) * self.page_size == result.inserted_tokens
        request.table[: len(kept)] = kept
        request.own_from = max(request.own_from, len(kept))
        self.undo(old)

    def end(self, request: Request) -> None:
        """The one way out: own pages back, lock released."""
        self.allocator.free(as_array(request.own))
        self.undo(request.lock)

    def checked_evict(self, pages: int) -> None:
        """Evict from the cache and the model."""
        per_unit = self.unit // self.page_size
        expected = self.model.evict(-(-pages // per_unit))
        assert self.cache.evict(pages) == expected * per_unit

    def cut_off(self) -> set[tuple[int, Prefix]]:
        """Prefixes of earlier epochs that a receipt still protects."""
        held = [*self.locks, *(request.lock for request in self.requests)]
        old = [lock for lock in held if lock.epoch != self.epoch]
        return {
            (lock.epoch, prefix)
            for lock in old
            for prefix in self.model.prefixes(lock.namespace, lock.tokens)
        }

    def check_kv(self, namespace: Namespace, tokens: Tokens, pages: list[int]) -> None:
        """Every page holds what was computed for exactly this prefix."""
        assert len(pages) == -(-len(tokens) // self.page_size)
        for index, page in enumerate(pages):
            end = min((index + 1) * self.page_size, len(tokens))
            assert self.written[page] == (namespace, tokens[:end]), f"page {page} holds another prefix's KV"


class RadixPage2(CacheMachine):
    """Pages of two tokens: most prompts end inside a page."""

    page_size = unit = 2
    total_pages = 14
    max_units = 6


class RadixPage3(CacheMachine):
    """Pages of three tokens: not a power of two, which the tree does not need."""

    page_size = unit = 3
    total_pages = 12
    max_units = 5


class HashBlocks(CacheMachine):
    """The hash cache: what is kept or dropped together is a block of two pages."""

    page_size = 8
    unit = HASH_BLOCK_SIZE
    max_units = 5
    total_pages = 30

    def make(self, allocator: PageAllocator) -> HashCache:
        return HashCache(allocator, self.page_size)


MACHINES = [CacheMachine, RadixPage2, RadixPage3, HashBlocks]


def run_machine(machine: type[CacheMachine], examples: int, steps: int, *, repeatable: bool) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=repeatable,
            report_multiple_bugs=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_operations_agrees_with_the_naive_model(machine: type[CacheMachine]) -> None:
    """F38 (first form): the same few examples each time, so that a change of the code is the only thing that can fail."""
    run_machine(machine, examples=50, steps=40, repeatable=True)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_orders_of_operations_agree_with_the_naive_model(machine: type[CacheMachine]) -> None:
    """F38: many, and others each time."""
    run_machine(machine, examples=2000, steps=50, repeatable=False)


def as_array(pages: list[int]) -> PageIndices:
    return np.array(pages, dtype=np.int32)
