"""The rule machine of the radix cache with all that it has: host tier, copies in flight, pins, public prefixes, policies, events.

Copies run as slowly as they like: the source must hold, and nobody may touch the destination, from the beginning of each to its
end, which comes in any order, by arriving or failing, also after a flush. A request that came back and whose KV is on its way
from the host begins when that has ended, whichever way. After every step the tree is read page by page and compared with the
naive model, and so is what its events say.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from prefixmesh.cache.accounting import NO_QUOTAS
from prefixmesh.cache.base import InsertResult, MatchResult
from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Copy as CopyInFlight
from prefixmesh.cache.transfers import Fetch, HostRead, Offload, Restore
from prefixmesh.errors import DoubleReleaseError
from prefixmesh.ids import Epoch
from tests.support.cache_machine import RememberingPool, Request, as_list, as_pages
from tests.support.event_readers import Follower, Listener
from tests.support.naive_tiers import (
    Copy,
    NaiveTiers,
    Prefix,
    Prompt,
    fingerprint,
    other_tier,
    prompt_of,
)
from tests.support.tier_machine_prompts import all_prompts
from tests.support.tier_pins import PinningMachine
from tests.support.tree_reader import nodes_of, read_tree

MAX_JOBS = 3
"""More would lock most of both tiers; the oldest ends when another begins."""
POLICIES: st.SearchStrategy[EvictionPolicy] = st.sampled_from(["lru", "lru", "lfu", "priority"])


@dataclass(slots=True)
class Job:
    """A copy in flight, what the model knows of it, and who waits for it."""

    copy: Copy
    job: CopyInFlight
    then: Prompt | None = None

    def pages(self, tier: Tier) -> list[int]:
        """Its pages on one tier."""
        return as_list(self.job.pages_on(tier))

    def ends_at(self, prefix: Prefix, epoch: int) -> bool:
        """Whether it copies the path to exactly this prefix."""
        return self.copy.epoch == epoch and self.copy.copied[-1] == prefix


class TierMachine(PinningMachine):
    """Every operation of the radix cache but quotas."""

    tiers = tuple(Tier)
    host_total: ClassVar[int] = 16
    block_sizes: ClassVar[tuple[int, ...]] = (2, 3)
    quotas: Mapping[Tier, Mapping[str, Quota]] = dict.fromkeys(Tier, NO_QUOTAS)
    cache: RadixCache

    def __init__(self) -> None:
        super().__init__()
        self.host_pool = RememberingPool(self.host_total)
        self.jobs: list[Job] = []
        self.ended: list[CopyInFlight] = []
        self.left_pages = 0
        self.priority = 0

    def make_cache(self, data: st.DataObject) -> None:
        policy = data.draw(POLICIES)
        self.block_size = data.draw(st.sampled_from(self.block_sizes))
        lives = itertools.count(7)
        publisher = CachePublisher(lambda: Epoch(next(lives)), log_events=20, log_blocks=40)
        self.listener = Listener(publisher)
        self.follower = Follower(publisher)
        options = RadixOptions(
            host=self.host_pool,
            policy=policy,
            block_size=self.block_size,
            quotas=self.quotas[Tier.DEVICE],
            host_quotas=self.quotas[Tier.HOST],
            pin_budget=self.budget,
            host_pin_budget=self.budget,
            events=self.listener,
        )
        self.cache = RadixCache(self.pool, self.page_size, options)
        self.model = NaiveTiers(self.unit, policy)

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        super().make(data)
        for _ in range(2):
            self.write_through(data)
        while self.jobs:
            self.end_job(self.jobs.pop(), arrived=True)
        self.checked_evict(Tier.DEVICE, data.draw(st.integers(0, 8)))

    # Copies.

    @precondition(lambda self: self.model.on[Tier.DEVICE])
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        """Something on the device is backed up."""
        prompt = prompt_of(data.draw(st.sampled_from(sorted(self.model.on[Tier.DEVICE]))))
        self.make_way()
        result = self.checked_match(prompt)
        found = prompt.upto(result.matched_tokens)
        self.begin_offload(found, result.last_device_node)

    @rule(data=st.data())
    def write_through(self, data: st.DataObject) -> None:
        """What is inserted is backed up at once, now and then something that is pinned on the host."""
        self.make_way()
        pinned = [prompt for _, prompt, tier in self.model.pins if tier is Tier.HOST]
        prompt = data.draw(st.sampled_from(pinned)) if pinned else self.draw_prompt(data)
        result = self.insert_whole(prompt)
        if result is not None:
            self.begin_offload(self.whole_units(prompt), result.last_device_node)

    @precondition(lambda self: self.only_on_host())
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Something that only the host has is brought back, or the front of it."""
        prompt = prompt_of(data.draw(st.sampled_from(sorted(self.only_on_host()))))
        tokens = data.draw(st.sampled_from([None, 1, self.unit, 2 * self.unit + 1]))
        begun = self.begin_restore(prompt, tokens=tokens)
        self.note("a part of a match was brought back", begun and tokens is not None)

    @rule(data=st.data(), more=st.integers(0, 3))
    def fetch(self, data: st.DataObject, more: int) -> None:
        """KV that is cached elsewhere is brought to the device, behind what it has of a prompt."""
        prompt = self.draw_prompt(data)
        self.make_way()
        result = self.checked_match(prompt)
        transfers, tokens = self.cache.transfers, more * self.unit
        wanted = self.whole_units(prompt.upto(result.matched_tokens + tokens))
        units = (len(wanted.tokens) - result.matched_tokens) // self.unit
        begin = functools.partial(transfers.begin_fetch, prompt.key(), result, tokens, self.owner)
        if not units:
            assert begin() is None
            return
        copy = self.model.begin_fetch(wanted)
        self.fly(copy, self.begin_with_room(Tier.DEVICE, units - self.pool.free_pages, begin))

    def read_host(self, data: st.DataObject) -> None:
        """Somebody reads what the host has of a prompt, to write it down."""
        if not self.model.on[Tier.HOST]:
            return
        prompt = prompt_of(data.draw(st.sampled_from(sorted(self.model.on[Tier.HOST]))))
        self.make_way()
        node = self.checked_match(prompt).last_host_node
        read = self.cache.transfers.begin_read(node)
        assert read is not None
        assert read.key == self.wish(prompt).key()
        self.fly(self.model.begin_read(prompt), read)

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(), arrived=st.sampled_from([True, True, True, False]), pages=st.sampled_from([0, 4, 8])
    )
    def acknowledge(self, data: st.DataObject, arrived: bool, pages: int) -> None:
        """A copy ends, not always the oldest, not always well; then somebody wants room, so that some is on the host alone."""
        self.end_job(self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1))), arrived=arrived)
        self.checked_evict(Tier.DEVICE, pages)

    @precondition(lambda self: self.coming())
    @rule(data=st.data())
    def insert_what_is_coming(self, data: st.DataObject) -> None:
        """F53: somebody else has computed it meanwhile."""
        job = data.draw(st.sampled_from(self.coming()))
        self.insert_whole(prompt_of(data.draw(st.sampled_from(job.copy.copied))))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def match_what_is_being_copied(self, data: st.DataObject) -> None:
        """Somebody else matches a part of it, and splits it."""
        job = data.draw(st.sampled_from(self.jobs))
        prompt = prompt_of(data.draw(st.sampled_from(job.copy.copied)))
        nodes = self.cache.node_count
        self.checked_match(prompt)
        self.note("a split of what is being copied", self.cache.node_count > nodes)

    # Others.

    def others(self) -> list[Callable[[st.DataObject], None]]:
        return [
            *super().others(),
            self.acknowledge_again,
            *[self.wait] * 3,
            *[self.let_others_ask] * 2,
            self.follow_anew,
            *[self.read_host] * 2,
        ]

    def peek(self, data: st.DataObject) -> None:
        super().peek(data)
        prompt = self.draw_prompt(data)
        before = self.cache.render()
        device, anywhere = self.model.on_device(prompt), self.model.anywhere(prompt)
        assert self.cache.peek_tiers(prompt.key()) == (device, anywhere - device)
        assert self.cache.render() == before

    def acknowledge_again(self, data: st.DataObject) -> None:
        """A second end of a copy raises and changes nothing."""
        if not self.ended:
            return
        job = data.draw(st.sampled_from(self.ended))
        before = self.cache.render()
        with pytest.raises(DoubleReleaseError):
            self.tell_end(job, arrived=data.draw(st.booleans()))
        assert self.cache.render() == before
        self.note("a second end of a copy")

    def let_others_ask(self, data: st.DataObject) -> None:
        """Who asks from now on has another priority."""
        self.priority = data.draw(st.integers(0, 2))

    def follow_anew(self, data: st.DataObject) -> None:
        """Another reader of the events begins with a snapshot."""
        self.follower.begin()

    # What holds after every step.

    def check(self) -> None:
        super().check()
        self.every_host_page_has_one_owner()
        self.pins_hold_what_their_tier_has()
        self.events_tell_the_blocks_of_each_tier()
        self.nodes_have_the_fingerprints_of_the_blocks_that_end_in_them()

    def every_host_page_has_one_owner(self) -> None:
        self.host_pool.check_invariants({"cache": self.cache.owned_pages(Tier.HOST)})
        host, locked = self.model.on[Tier.HOST], self.model.protected(Tier.HOST)
        cut_off = len(self.model.cut_off[Tier.HOST])
        assert self.cache.host_pages == len(host) + cut_off
        assert self.cache.host_protected_pages == len(locked) + cut_off
        figures = self.cache.host_figures
        assert sum(figures[1:]) == figures.total == self.host_total
        assert figures.free == self.host_pool.free_pages
        assert self.cache.copying_pages == sum(len(job.copy.copied) for job in self.coming())

    def check_contents(self) -> None:
        """The tree, page by page, is what the model has: on which tiers, with which KV, how protected, how often used."""
        places = read_tree(self.cache)
        assert places.keys() == self.model.all_prefixes()
        pinned = {tier: self.model.pinned(tier) for tier in Tier}
        for prefix, place in places.items():
            node = place.node
            for tier in Tier:
                page = place.page(tier)
                assert (page is not None) == (prefix in self.model.on[tier])
                assert page is None or self.pool_of(tier).contents.get(page) == prefix
            locks = [self.model.locks[tier][prefix] + pinned[tier][prefix] for tier in Tier]
            assert [node.lock_ref, node.host_ref_counter] == locks
            assert [node.pin_ref, node.host_pin_ref] == [pinned[tier][prefix] for tier in Tier]
            assert (node.hit_count, node.priority) == (self.model.hits[prefix], self.model.priority[prefix])
            assert node.last_access_time == self.model.accessed[prefix]

    def events_tell_the_blocks_of_each_tier(self) -> None:
        followed = self.follower.follow()
        for tier in Tier:
            blocks = self.model.blocks(tier, self.block_size)
            assert self.listener.blocks[tier] == blocks
            assert self.cache.blocks(tier) == blocks.keys()
            assert followed is None or followed[tier] == blocks.keys()

    def nodes_have_the_fingerprints_of_the_blocks_that_end_in_them(self) -> None:
        for node, prefixes in nodes_of(self.cache):
            (space, tokens), size = prefixes[-1], self.block_size
            ends = range(size, len(tokens) + 1, size)
            assert node.hash_value == tuple(
                fingerprint(space, tokens[:end], size) for end in ends if end > node.start
            )

    # Helpers.

    def pool_of(self, tier: Tier) -> RememberingPool:
        """The pages of one tier."""
        return self.pool if tier is Tier.DEVICE else self.host_pool

    def only_on_host(self) -> list[Prefix]:
        """What a restore could bring back."""
        device = self.model.on[Tier.DEVICE]
        return [prefix for prefix in self.model.on[Tier.HOST] if prefix not in device]

    def coming(self) -> list[Job]:
        """Restores and fetches in flight."""
        return [job for job in self.jobs if job.copy.target is Tier.DEVICE]

    def all_prompts(self) -> list[Prompt]:
        return all_prompts(self.unit, self.max_units, self.block_size)

    def ask_match(self, prompt: Prompt) -> MatchResult:
        host_hit = self.model.anywhere(prompt) - self.model.on_device(prompt)
        result = self.cache.match_prefix(prompt.key(), self.now, self.priority)
        assert result.host_hit_length == host_hit
        self.model.expire(self.now)
        self.model.match(prompt, self.now, self.priority)
        return result

    def ask_insert(self, prompt: Prompt, pages: list[int]) -> InsertResult:
        return self.cache.insert(
            prompt.key(), as_pages(pages), self.now, priority=self.priority, owner=self.owner
        )

    def note_insert(self, prompt: Prompt) -> None:
        self.model.expire(self.now)
        found = self.model.anywhere(prompt) > self.model.on_device(prompt)
        self.note("insert over what only the host has", found)
        self.model.insert(prompt, self.now, self.priority)

    def put_away(self, request: Request) -> None:
        """What a request has to leave behind is backed up, so that it finds it again on one tier or the other."""
        self.make_way()
        lock, node = request.lock, request.lock.receipt.node
        if lock.epoch == self.model.epoch and node is not None:
            self.begin_offload(lock.prompt, node)

    def resume(self, prompt: Prompt) -> None:
        if self.begin_restore(prompt, then=prompt):
            self.note("came back to KV on the host")
        else:
            self.start(prompt)

    def begin_offload(self, prompt: Prompt, node: TreeNode) -> None:
        """Have what the host lacks of a prompt, which ends at this node, copied there, as far as there is room."""
        begin = functools.partial(self.cache.transfers.begin_offload, node)
        wanted = self.model.to_copy(Tier.DEVICE, prompt)
        if not wanted or self.is_being_offloaded(wanted[-1]):
            assert begin() is None
            return
        path, epoch = prompt.prefixes(self.unit), self.model.epoch
        there = path[: len(path) - len(wanted)]
        self.model.lock(Tier.HOST, there)
        job, room = self.offload_with_room(wanted, begin)
        self.left_pages += len(wanted) - room
        assert self.cache.transfers.left_pages == self.left_pages
        self.note("a part of a prompt was backed up", 0 < room < len(wanted))
        if not room or self.is_being_offloaded(wanted[room - 1]):
            assert job is None
            self.note("no room on the host for a copy", not room)
            self.model.release(Tier.HOST, there, epoch)
            return
        locked = {Tier.DEVICE: path[: len(there) + room], Tier.HOST: there}
        self.model.lock(Tier.DEVICE, locked[Tier.DEVICE])
        self.fly(Copy(Tier.DEVICE, Tier.HOST, wanted[:room], locked, epoch), job)

    def offload_with_room(
        self, wanted: list[Prefix], begin: Callable[[], CopyInFlight | None]
    ) -> tuple[CopyInFlight | None, int]:
        """Begin a backup; returns it, and for how many of the pages there is room: free, or held by what the policy gives up for each."""
        places, room, free = read_tree(self.cache), 0, self.host_pool.free_pages
        for _, run in itertools.groupby(wanted, lambda prefix: places[prefix].node):
            pages = list(run)
            need, goes = room + len(pages), self.model.goes_for(pages[-1])
            short = max(0, need - free)
            free += len(self.evict_in_model(Tier.HOST, min(short, len(goes))))
            room = min(need, free)
            if room < need:
                self.note("the host kept what ranks higher", bool(self.model.line(Tier.HOST)))
                break
        return begin(), room

    def begin_restore(self, prompt: Prompt, then: Prompt | None = None, tokens: int | None = None) -> bool:
        """Match, and have what only the host holds brought back, or so many tokens of it; False when there is nothing, or no room."""
        self.make_way()
        result = self.checked_match(prompt)
        brought = result.host_hit_length
        if tokens is not None:
            brought = min(brought, tokens // self.unit * self.unit)
        found = prompt.upto(result.matched_tokens + brought)
        begin = functools.partial(self.cache.transfers.begin_restore, result, self.owner, tokens)
        wanted = self.model.to_copy(Tier.HOST, found)
        if not wanted:
            assert begin() is None
            return False
        copy = self.model.begin_restore(found)
        job = self.begin_with_room(Tier.DEVICE, len(wanted) - self.pool.free_pages, begin)
        return self.fly(copy, job, then)

    def make_way(self) -> None:
        """A worker's queue is bounded: the oldest copy arrives before too many are on their way."""
        if len(self.jobs) >= MAX_JOBS:
            self.end_job(self.jobs.pop(0), arrived=True)

    def fly(self, copy: Copy, job: CopyInFlight | None, then: Prompt | None = None) -> bool:
        """A copy has begun; False when there was no room for it."""
        if job is None:
            self.note(f"no room on the {copy.target} for a copy")
            self.model.refuse_copy(copy)
            return False
        self.jobs.append(Job(copy, job, then))
        self.take_pages(self.jobs[-1])
        return True

    def begin_with_room(
        self, target: Tier, missing: int, begin: Callable[[], CopyInFlight | None]
    ) -> CopyInFlight | None:
        """Begin a copy for which so many pages have to be evicted; None when that is too many."""
        if missing > len(self.model.line(target)):
            assert begin() is None
            return None
        self.evict_in_model(target, missing)
        job = begin()
        assert job is not None
        return job

    def is_being_offloaded(self, prefix: Prefix) -> bool:
        """Whether a copy of the path to exactly here is on its way to the host."""
        jobs = [job for job in self.jobs if job.copy.source is Tier.DEVICE]
        return any(job.ends_at(prefix, self.model.epoch) for job in jobs)

    def take_pages(self, job: Job) -> None:
        """The source holds what is to be copied; the destination is nobody else's."""
        self.check_source(job)
        target = job.copy.target
        if target is not None:
            assert self.contents(target, job) == [None] * len(job.copy.copied)
            self.pool_of(target).contents.update(dict.fromkeys(job.pages(target), in_flight(job)))

    def check_source(self, job: Job) -> None:
        """What is read for a copy holds what is to be copied."""
        if job.copy.source is not None:
            assert self.contents(job.copy.source, job) == job.copy.copied

    def contents(self, tier: Tier, job: Job) -> list[Prefix | None]:
        """What a copy's pages on one tier hold."""
        return [self.pool_of(tier).contents.get(page) for page in job.pages(tier)]

    def end_job(self, job: Job, *, arrived: bool) -> None:
        """Acknowledge a copy, or give it up; both its ends are as they were when it began."""
        copy = job.copy
        self.check_source(job)
        if copy.target is not None:
            assert self.contents(copy.target, job) == [in_flight(job)] * len(copy.copied)
            if arrived:
                pages = zip(job.pages(copy.target), copy.copied, strict=True)
                self.pool_of(copy.target).contents.update(pages)
        if arrived and copy.source is None and copy.epoch == self.model.epoch:
            self.note_fetched(job)
        self.tell_end(job.job, arrived=arrived)
        self.ended.append(job.job)
        self.note_end(job, arrived, self.model.end_copy(copy, arrived=arrived, now=self.now))
        if job.then is not None:
            self.start(job.then)

    def note_fetched(self, job: Job) -> None:
        """What a fetch brings is about to be inserted."""
        self.model.expire(self.now)

    def note_end(self, job: Job, arrived: bool, already: list[Prefix]) -> None:
        """Count how copies end."""
        what = f"{type(job.job).__name__} {'arrived' if arrived else 'failed'}"
        self.note(what + " after a flush" * (job.copy.epoch != self.model.epoch))
        self.note(f"{what} and met what it brought", bool(already))
        self.note(f"{what} and met a part of what it brought", 0 < len(already) < len(job.copy.copied))

    def tell_end(self, job: CopyInFlight, *, arrived: bool) -> None:
        """Call what ends this copy."""
        transfers = self.cache.transfers
        match job:
            case Offload():
                (transfers.finish_offload if arrived else transfers.abort_offload)(job)
            case Restore():
                (transfers.finish_restore if arrived else transfers.fail_restore)(job)
            case Fetch() if arrived:
                transfers.finish_fetch(job, self.now)
            case Fetch():
                transfers.fail_fetch(job)
            case HostRead():
                transfers.end_read(job)

    def evict_in_cache(self, tier: Tier, pages: int) -> int:
        evict = self.cache.evict if tier is Tier.DEVICE else self.cache.evict_host
        return evict(pages, self.owner)

    def evict_in_model(self, tier: Tier, units: int) -> list[Prefix]:
        """Evict from the model. Where only the end goes of a node that both tiers have, what stays is used on the other."""
        places = read_tree(self.cache)
        gone = self.model.evict(tier, units)
        if not gone:
            return gone
        other = other_tier(tier)
        self.note(f"{tier.name} eviction that left a copy", not self.model.on[other].keys().isdisjoint(gone))
        if places[gone[-1]].nth:  # else the whole node has gone
            self.note(f"a long leaf trimmed on the {tier.name}")
            if gone[-1] in self.model.on[other]:
                prompt = prompt_of(gone[-1])
                self.model.use(prompt.upto(len(prompt.tokens) - self.unit).prefixes(self.unit), [other])
        return gone

    def empty(self) -> None:
        while self.jobs:
            self.end_job(self.jobs.pop(), arrived=True)
        self.unpin_all()
        super().empty()
        assert self.host_pool.free_pages == self.host_total


def in_flight(job: Job) -> Prefix:
    """What a page holds that a copy is being written to."""
    return (b"in flight", b"", id(job.copy)), ()
