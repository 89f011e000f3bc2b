"""The rule machine of every prefix cache: requests, locks, eviction and flushes, in any order, beside the naive model.

Requests live as a scheduler lets them live: match and lock in one step, pages of their own for what is not cached, inserts in
chunks, an end by finishing, aborting or preemption, after which they come back. Several run at once, so that duplicates, shared
prefixes and splits under locks are common; the pool is so small that eviction is too. Every page remembers which prefix was
computed into it, forgets it when it becomes free, and every page that a cache hands out is read back.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixmesh.cache.base import InsertResult, MatchResult, PageIndices
from prefixmesh.cache.hash_cache import HashCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import DoubleReleaseError
from tests.support.cache_kit import NS_A, NS_B
from tests.support.naive_tiers import NaiveTiers, Prefix, Prompt, Tokens

MAX_REQUESTS = 3
MAX_LOCKS = 2
MAX_WAITING = 3
MORE_THAN_ALL = 100
"""Pages of the largest pool here, and some."""
"""More would hold the whole pool, and most steps would fail for want of pages."""


class RememberingPool(PageAllocator):
    """A pool whose every page remembers what was computed into it, until it is free."""

    def __init__(self, total_pages: int) -> None:
        super().__init__(total_pages)
        self.contents: dict[int, Prefix] = {}

    def free(self, pages: PageIndices) -> None:
        """Give pages back; they hold nothing any more."""
        super().free(pages)
        for page in pages.tolist():
            self.contents.pop(page, None)


@dataclass(slots=True)
class Lock:
    """A receipt and what the model knows of it."""

    receipt: LockReceipt
    prompt: Prompt
    epoch: int
    pages: list[int]
    """What its holder reads."""


@dataclass(slots=True)
class Request:
    """A running request: its tokens with KV, its page table, and from where on the pages are its own."""

    prompt: Prompt
    table: list[int]
    own_from: int
    lock: Lock

    @property
    def own(self) -> list[int]:
        """Pages that only this request knows."""
        return self.table[self.own_from :]


class CacheMachine(RuleBasedStateMachine):
    """Every operation that all kinds of prefix cache have."""

    page_size: ClassVar[int] = 1
    unit: ClassVar[int] = 1
    """Tokens that are kept or dropped together: a page, or a block."""
    total_pages: ClassVar[int] = 20
    max_units: ClassVar[int] = 8
    tiers: ClassVar[tuple[Tier, ...]] = (Tier.DEVICE,)
    happened: ClassVar[Counter[str]]
    """What the rules have led to in all runs of this class: shows that the deep cases are reached."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.happened = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.pool = RememberingPool(self.total_pages)
        self.requests: list[Request] = []
        self.waiting: list[Prompt] = []
        """Of requests that were preempted, or for which there were no pages."""
        self.locks: list[Lock] = []
        self.used_receipts: list[LockReceipt] = []
        self.double_releases = 0
        self.now = 0.0
        self.owner = ""

    cache: RadixCache | HashCache
    model: NaiveTiers
    prompts: st.SearchStrategy[Prompt]

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        """A cache with something in it: an empty one has few ways to go wrong."""
        self.make_cache(data)
        self.prompts = st.sampled_from(self.all_prompts())
        for _ in range(3):
            self.warm(data)

    def make_cache(self, data: st.DataObject) -> None:
        """The cache under test and its model."""
        raise NotImplementedError

    # What requests do.

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(data=st.data(), twice=st.booleans())
    def begin(self, data: st.DataObject, twice: bool) -> None:
        """A request arrives, locks its match and gets pages for the rest, or waits when there are none. Two with one prompt
        both compute what is not cached, and one of them will have duplicates."""
        prompt = self.draw_prompt(data)
        for _ in range(1 + twice):
            self.start(prompt)

    @rule(data=st.data())
    def warm(self, data: st.DataObject) -> None:
        """A whole prompt is computed into pages of its own and inserted, with nothing locked."""
        self.insert_whole(self.draw_prompt(data))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.booleans(), give=st.booleans())
    def go_on(self, data: st.DataObject, more: bool, give: bool) -> None:
        """A running request computes another chunk, or gives what it has computed to the cache, or both."""
        request = data.draw(st.sampled_from(self.requests))
        if more:
            self.compute(request, request.prompt.tokens + self.draw_prompt(data).tokens[: 2 * self.unit])
        if give:
            self.give(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), preempted=st.booleans(), keep=st.booleans())
    def leave(self, data: st.DataObject, preempted: bool, keep: bool) -> None:
        """A request finishes, or is aborted, or makes room for others and will come back; it leaves what it has computed in the
        cache, or does not. What is its own comes back."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if keep:
            self.give(request)
        if preempted:
            self.put_away(request)
            self.waiting.append(request.prompt)
        self.let_go(request)

    @precondition(lambda self: self.waiting and len(self.requests) < MAX_REQUESTS)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A request that waits matches again and computes what is no longer there."""
        prompt = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.note("came back to a part of its own KV", 0 < self.model.on_device(prompt) < len(prompt.tokens))
        self.resume(prompt)

    # What anybody may ask.

    @rule(data=st.data(), lock=st.booleans())
    def match(self, data: st.DataObject, lock: bool) -> None:
        """A match that nobody locks, or that is locked for more than a step."""
        if lock and len(self.locks) < MAX_LOCKS:
            self.locks.append(self.match_and_lock(self.draw_prompt(data))[0])
        else:
            self.checked_match(self.draw_prompt(data))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any lock ends, whatever was split since."""
        self.undo(self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1))))

    @rule(data=st.data(), pages=st.sampled_from([1, 1, 2, 5]))
    def evict(self, data: st.DataObject, pages: int) -> None:
        """Exactly the model's pages go."""
        self.checked_evict(data.draw(st.sampled_from(self.tiers)), pages)

    @rule(data=st.data())
    def other(self, data: st.DataObject) -> None:
        """What should happen now and then: oftener, most steps would change nothing, or there would be little to change."""
        data.draw(st.sampled_from(self.others()))(data)

    def others(self) -> list[Callable[[st.DataObject], None]]:
        """What else may happen, as often as it stands here."""
        return [self.peek, self.peek, self.release_again, self.flush, self.flush, self.all_leave]

    def peek(self, data: st.DataObject) -> None:
        """A peek tells the model's length and leaves the drawing of the whole tree as it was."""
        prompt = self.draw_prompt(data)
        before = self.cache.render()
        assert self.cache.peek(prompt.key()) == self.model.on_device(prompt)
        assert self.cache.render() == before

    def release_again(self, data: st.DataObject) -> None:
        """A second release raises, is counted, and changes nothing."""
        if not self.used_receipts:
            return
        receipt = data.draw(st.sampled_from(self.used_receipts))
        before = self.cache.render()
        with pytest.raises(DoubleReleaseError):
            self.cache.release(receipt)
        self.double_releases += 1
        assert self.cache.render() == before
        self.note("a second release")

    def flush(self, data: st.DataObject) -> None:
        """Nothing matches any more; what is locked stays readable, and whoever reads it may go on to insert."""
        self.note("flush under locks", any(self.model.locks.values()))
        self.cache.flush()
        self.model.flush()
        if self.requests:
            self.give(data.draw(st.sampled_from(self.requests)))

    def all_leave(self, data: st.DataObject) -> None:
        """When all have left and all is evicted, every page is free."""
        self.empty()
        self.note("all left, all free")

    def empty(self) -> None:
        """Let all end, and evict all."""
        while self.requests:
            self.let_go(self.requests.pop())
        while self.locks:
            self.undo(self.locks.pop())
        self.evict_all()
        assert self.pool.free_pages == self.total_pages

    def evict_all(self) -> None:
        """Leave nothing on any tier."""
        for tier in self.tiers:
            self.checked_evict(tier, MORE_THAN_ALL)

    # What holds after every step.

    @invariant()
    def all_is_well(self) -> None:
        """One invariant and not many: so a failing example shows its steps and little else."""
        self.check()

    def check(self) -> None:
        """All of it."""
        self.note("steps")
        self.cache.check_invariants()
        self.every_page_has_one_owner()
        self.the_cache_holds_what_the_model_holds()
        self.whoever_reads_reads_their_own_kv()

    def every_page_has_one_owner(self) -> None:
        owners = {f"request {i}": as_pages(request.own) for i, request in enumerate(self.requests)}
        self.pool.check_invariants(owners | {"cache": self.cache.owned_pages()})

    def the_cache_holds_what_the_model_holds(self) -> None:
        device, locked = self.model.on[Tier.DEVICE], self.model.protected(Tier.DEVICE)
        per_unit = self.unit // self.page_size
        assert self.cache.evictable_pages == (len(device) - len(locked)) * per_unit
        cut_off = len(self.model.cut_off[Tier.DEVICE])
        assert self.cache.protected_pages == (len(locked) + cut_off) * per_unit
        assert self.cache.double_releases == self.double_releases
        self.check_contents()

    def check_contents(self) -> None:
        """Each of the model's prefixes is found."""
        for (namespace, tail, boundary), tokens in self.model.on[Tier.DEVICE]:
            assert self.cache.peek(Prompt(namespace, tokens, boundary, tail).key()) == len(tokens)

    def whoever_reads_reads_their_own_kv(self) -> None:
        for request in self.requests:
            self.check_kv(request.prompt, request.table)
        for lock in self.locks:
            self.check_kv(lock.prompt, lock.pages)

    # Helpers.

    def draw_prompt(self, data: st.DataObject) -> Prompt:
        """Any prompt."""
        return data.draw(self.prompts)

    def all_prompts(self) -> list[Prompt]:
        """Every prompt there is, in one of two namespaces."""
        return plain_prompts(self.unit, self.max_units)

    def note(self, what: str, happened: bool = True) -> None:
        """Count what was reached."""
        if happened:
            self.happened[what] += 1

    def ask_match(self, prompt: Prompt) -> MatchResult:
        """Match, in the model too."""
        result = self.cache.match_prefix(prompt.key(), self.now)
        self.model.match(prompt, self.now)
        return result

    def ask_insert(self, prompt: Prompt, pages: list[int]) -> InsertResult:
        """Insert, not yet in the model."""
        return self.cache.insert(prompt.key(), as_pages(pages), self.now)

    def note_insert(self, prompt: Prompt) -> None:
        """Tell the model of an insert of whole units."""
        self.model.insert(prompt, self.now)

    def checked_match(self, prompt: Prompt) -> MatchResult:
        """Match, compare with the model, read every page back."""
        self.now += 1
        expected = self.model.on_device(prompt)
        result = self.ask_match(prompt)
        assert result.matched_tokens == expected
        assert len(result.device_indices) * self.page_size == result.matched_tokens
        self.check_kv(prompt.upto(result.matched_tokens), result.device_indices.tolist())
        return result

    def match_and_lock(self, prompt: Prompt) -> tuple[Lock, MatchResult]:
        """Match and lock in one step."""
        result = self.checked_match(prompt)
        return self.lock_node(result, prompt.upto(result.matched_tokens)), result

    def lock_node(self, result: MatchResult | InsertResult, prompt: Prompt) -> Lock:
        """Lock where the prompt ends, in the model too."""
        receipt = self.cache.lock(result.last_device_node)
        self.model.lock(Tier.DEVICE, prompt.prefixes(self.unit))
        return Lock(receipt, prompt, self.model.epoch, result.device_indices.tolist())

    def undo(self, lock: Lock) -> None:
        """Release, in the model too."""
        self.cache.release(lock.receipt)
        self.used_receipts.append(lock.receipt)
        self.model.release(Tier.DEVICE, lock.prompt.prefixes(self.unit), lock.epoch)
        self.note(
            "release of what a flush cut off", lock.epoch != self.model.epoch and bool(lock.prompt.tokens)
        )

    def start(self, prompt: Prompt) -> None:
        """A request begins to run, or waits when there are no pages for it."""
        lock, result = self.match_and_lock(prompt)
        table = result.device_indices.tolist()
        request = Request(lock.prompt, table, len(table), lock)
        if self.compute(request, prompt.tokens):
            self.requests.append(request)
        else:
            self.let_go(request)
            self.waiting = [*self.waiting, prompt][-MAX_WAITING:]

    def put_away(self, request: Request) -> None:
        """A request is about to be preempted."""

    def resume(self, prompt: Prompt) -> None:
        """A preempted request begins again."""
        self.start(prompt)

    def compute(self, request: Request, tokens: Tokens) -> bool:
        """Write KV up to so many tokens into pages of the request's own; False when there are none even after evicting."""
        fresh = self.pages_for(len(tokens), have=len(request.table))
        if fresh is None:
            self.note("no pages for a request")
            return False
        request.table += fresh
        request.prompt = request.prompt._replace(tokens=tokens)
        self.write(request.prompt, request.table, request.own_from)
        return True

    def insert_whole(self, prompt: Prompt) -> InsertResult | None:
        """Compute and insert a prompt with nothing locked; None when running requests hold too many pages."""
        pages = self.pages_for(len(prompt.tokens))
        if pages is None:
            return None
        self.now += 1
        self.write(prompt, pages, 0)
        cached = self.model.on_device(prompt)
        result = self.ask_insert(prompt, pages)
        whole = self.whole_units(prompt)
        assert (result.prefix_tokens, result.inserted_tokens) == (cached, len(whole.tokens))
        self.check_kv(whole, result.device_indices.tolist())
        self.note_insert(whole)
        self.pool.free(as_pages(pages[len(whole.tokens) // self.page_size :]))
        return result

    def pages_for(self, tokens: int, have: int = 0) -> list[int] | None:
        """New pages for so many tokens, evicting when there are too few; None when even that does not help."""
        missing = -(-tokens // self.page_size) - have
        if missing > self.pool.free_pages:
            self.checked_evict(Tier.DEVICE, missing - self.pool.free_pages)
        fresh = self.pool.allocate(missing)
        return None if fresh is None else fresh.tolist()

    def write(self, prompt: Prompt, table: list[int], start: int) -> None:
        """Compute: every page from ``start`` on holds its prefix's KV now."""
        for index in range(start, len(table)):
            self.pool.contents[table[index]] = self.content(prompt, index)

    def content(self, prompt: Prompt, index: int) -> Prefix:
        """What belongs in the page at ``index`` of the prompt's table."""
        return prompt.prefix(min((index + 1) * self.page_size, len(prompt.tokens)))

    def check_kv(self, prompt: Prompt, pages: list[int]) -> None:
        """Every page holds what was computed for exactly this prefix."""
        assert len(pages) == -(-len(prompt.tokens) // self.page_size)
        for index, page in enumerate(pages):
            assert self.pool.contents.get(page) == self.content(prompt, index), f"page {page} holds other KV"

    def give(self, request: Request) -> None:
        """Insert what the request has, take the shared pages, move the lock to the new end."""
        self.now += 1
        old, cached = request.lock, self.model.on_device(request.prompt)
        result = self.ask_insert(request.prompt, request.table)
        if old.prompt.tokens and old.epoch != self.model.epoch:
            # A flush cut off what the request reads: none of it enters the new tree, and it stays readable.
            assert (result.prefix_tokens, result.inserted_tokens) == (0, 0)
            request.lock = self.lock_cut_off(result, old)
        else:
            whole = self.whole_units(request.prompt)
            assert (result.prefix_tokens, result.inserted_tokens) == (cached, len(whole.tokens))
            self.note_insert(whole)
            # The new lock before the old one's end, so that there is no moment at which nothing protects what is read.
            request.lock = self.lock_node(result, whole)
        kept = result.device_indices.tolist()
        assert len(kept) * self.page_size == result.inserted_tokens
        self.note("insert of duplicates", kept != request.table[: len(kept)])
        request.table[: len(kept)] = kept
        request.own_from = max(request.own_from, len(kept))
        self.undo(old)

    def lock_cut_off(self, result: InsertResult, old: Lock) -> Lock:
        """One more lock on what an earlier epoch has left."""
        receipt = self.cache.lock(result.last_device_node)
        prefixes = old.prompt.prefixes(self.unit)
        self.model.cut_off[Tier.DEVICE].update((old.epoch, prefix) for prefix in prefixes)
        self.note("insert of what a flush cut off")
        return Lock(receipt, old.prompt, old.epoch, old.pages)

    def let_go(self, request: Request) -> None:
        """The one way out: own pages back, lock released."""
        self.pool.free(as_pages(request.own))
        self.undo(request.lock)

    def whole_units(self, prompt: Prompt) -> Prompt:
        """The prompt without what is short of a unit."""
        return prompt.upto(len(prompt.tokens) - len(prompt.tokens) % self.unit)

    def checked_evict(self, tier: Tier, pages: int) -> None:
        """Evict from the cache and the model."""
        per_unit = self.unit // self.page_size
        gone = self.evict_in_model(tier, -(-pages // per_unit))
        assert self.evict_in_cache(tier, pages) == len(gone) * per_unit

    def evict_in_cache(self, tier: Tier, pages: int) -> int:
        """Evict from the one tier that there is."""
        assert tier is Tier.DEVICE
        return self.cache.evict(pages)

    def evict_in_model(self, tier: Tier, units: int) -> list[Prefix]:
        """Evict from the model."""
        return self.model.evict(tier, units)


@functools.cache
def plain_prompts(unit: int, max_units: int) -> list[Prompt]:
    """All token sequences, in one of two namespaces."""
    return [Prompt(where, tokens) for tokens in all_tokens(unit, max_units) for where in (NS_A, NS_A, NS_B)]


def all_tokens(unit: int, max_units: int) -> list[Tokens]:
    """Every token sequence there is, shortest and simplest first: mostly one and the same unit, so that prefixes are shared and
    diverge late, also within a unit; every other one some tokens short of a unit. One list, so that a prompt is one choice and
    not ten: half of a machine's time is Hypothesis's own."""
    units: list[Tokens] = [(0,) * unit, (*(0,) * (unit - 1), 1), (2,) * unit]
    sequences: list[Tokens] = []
    for length in range(1, max_units + 1):
        for places in itertools.combinations(range(length + 2), 2):  # beyond the end: no other unit there
            for others in itertools.product((1, 2), repeat=2):
                kinds = [0] * (length + 2)
                for place, other in zip(places, others, strict=True):
                    kinds[place] = other
                tokens = tuple(token for kind in kinds[:length] for token in units[kind])
                sequences.append(tokens + (0,) * (len(sequences) % 2 * (unit - 1)))
    return sequences


def as_pages(pages: list[int]) -> PageIndices:
    """Page indices of the type that caches take."""
    return np.array(pages, dtype=np.int32)


def as_list(pages: PageIndices) -> list[int]:
    """The same as plain numbers."""
    return [int(page) for page in pages]
