"""Who is set aside while its prefix comes from the disk, for how long, and what goes to the disk: over a real tree and a disk that obeys."""

from typing import Any

import numpy as np
import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.transfers import Fetch
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers import disk_fetches
from prefixmesh.worker.tiers.disk_desk import DiskDesk
from prefixmesh.worker.tiers.disk_fetches import LEAST_WAIT_S, MAX_READS, FetchedRange
from prefixmesh.worker.tiers.disk_writes import DiskWrites
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates
from tests.support.disk_kit import LAYOUT, long_key
from tests.support.fake_disk import FakeDisk

PAGE = LAYOUT.page_size
PAGES = 64


class Stage:
    """A tree on both tiers, a disk, the desk between them, and the copies that it asked for."""

    def __init__(self, engine: EngineRates | None = None) -> None:
        self.device, self.host = PageAllocator(PAGES), PageAllocator(2 * PAGES)
        self.cache = RadixCache(self.device, PAGE, RadixOptions(host=self.host, block_size=LAYOUT.block_size))
        self.disk = FakeDisk(LAYOUT)
        self.copies: list[tuple[Fetch, list[int]]] = []
        self.desk = DiskDesk(
            self.cache,
            self.disk,
            engine or EngineRates(),
            LoadBackRates(token_bytes=1.0),
            self._copy,
            device_pages=PAGES,
            page_bytes=LAYOUT.page_bytes,
        )
        self.fetches = self.desk.fetches

    def _copy(self, copy: Fetch, buffer: Any, now: float) -> None:
        assert len(copy.device_pages) == len(buffer)
        self.copies.append((copy, buffer))

    def compute(self, key: RadixKey) -> None:
        """As a request does that found nothing, to its end."""
        pages = self.device.allocate(len(key.tokens) // TOKEN_BYTES // PAGE)
        assert pages is not None
        self.cache.insert(key, pages, 0.0)

    def back_up(self, key: RadixKey) -> None:
        node = self.cache.match_prefix(key, 0.0).last_device_node
        copy = self.cache.transfers.begin_offload(node)
        if copy is not None:
            self.cache.transfers.finish_offload(copy)
        self.desk.backed_up(node)
        self.desk.collect(0.0)

    def consider(self, request_id: str, key: RadixKey, now: float = 0.0) -> bool:
        is_aside = self.fetches.consider(request_id, lambda: key, "", now)
        self.collect(now)
        return is_aside

    def collect(self, now: float = 0.0) -> None:
        self.desk.collect(now)
        self.check()

    def end_copy(self, error: str = "", now: float = 0.0) -> None:
        copy, _ = self.copies.pop(0)
        self.desk.copied(copy, error, now)
        self.check()

    def check(self) -> None:
        self.cache.check_invariants()
        self.device.check_invariants()
        self.host.check_invariants()
        self.fetches.check_invariants()

    def at_rest(self) -> bool:
        nothing_locked = self.cache.protected_pages == 0 == self.cache.host_protected_pages
        return nothing_locked and not self.cache.transfers.in_flight and not self.desk.is_busy


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_candidate_is_set_aside_until_its_prefix_is_in_the_tree(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    assert stage.fetches.waiting == ["r"]
    assert stage.consider("r", key)
    stage.disk.finish_read()
    stage.collect()
    assert stage.copies[0][1] == list(range(0, 40, PAGE))
    assert stage.consider("r", key)  # its copy is under way
    stage.end_copy()
    assert not stage.consider("r", key)
    assert stage.cache.peek(key) == 40
    assert stage.fetches.fetched("r") == FetchedRange(0, 40)
    assert stage.fetches.fetched_tokens == 40
    assert stage.at_rest()


def test_only_what_the_device_lacks_is_read(stage: Stage) -> None:
    stage.compute(long_key(18))
    stage.disk.keep(long_key(40))
    assert stage.consider("r", long_key(46))
    (prefix,) = stage.disk.reads.values()
    assert (prefix.start_tokens, prefix.end_tokens) == (18, 40)
    stage.disk.finish_read()
    stage.collect()
    stage.end_copy()
    assert stage.fetches.fetched("r") == FetchedRange(18, 40)
    assert stage.fetches.fetched("r").within(46) == 22
    assert stage.fetches.fetched("r").within(30) == 12
    assert stage.fetches.fetched("r").within(10) == 0


def test_what_the_other_tiers_have_is_not_read(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    stage.compute(key)
    stage.back_up(key)
    assert not stage.consider("on the device", key)
    stage.cache.evict(PAGES)
    assert not stage.consider("on the host", key)
    assert not stage.consider("unknown", long_key(40, first=900))
    assert stage.disk.reads == {}


def test_who_wants_the_same_waits_for_the_same_and_then_looks_for_its_own(stage: Stage) -> None:
    mine = long_key(40)
    other = RadixKey(mine.namespace, mine.tokens[: 20 * 4] + long_key(20, first=900).tokens)
    stage.disk.keep(mine)
    stage.disk.keep(other)
    assert stage.consider("a", mine)
    assert stage.consider("b", other)
    assert len(stage.disk.reads) == 1
    stage.disk.finish_read()
    stage.collect()
    stage.end_copy()
    assert not stage.consider("a", mine)
    assert stage.consider("b", other)
    (prefix,) = stage.disk.reads.values()
    assert (prefix.start_tokens, prefix.end_tokens) == (20, 40)


def test_files_that_are_bad_cost_what_was_in_them(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    stage.disk.finish_read(size_tokens=32)
    stage.collect()
    stage.end_copy()
    assert not stage.consider("r", key)
    assert stage.cache.peek(key) == 32


@pytest.mark.parametrize("where", ["read", "copy", "time", "flush", "evicted before it"])
def test_whatever_goes_wrong_the_request_computes_and_nothing_stays_held(stage: Stage, where: str) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    if where == "evicted before it":
        stage.compute(long_key(8))
    assert stage.consider("r", key)
    now = 0.0
    match where:
        case "read":
            stage.disk.finish_read(size_tokens=0)
        case "copy":
            stage.disk.finish_read()
            stage.collect()
            stage.end_copy("the device said no")
        case "time":
            now = LEAST_WAIT_S
        case "flush":
            stage.disk.finish_read()
            stage.collect()
            stage.cache.flush()
            stage.desk.flushed()
            stage.end_copy()
        case "evicted before it":
            stage.cache.evict(PAGES)
            stage.disk.finish_read()
    stage.collect(now)
    assert not stage.consider("r", key, now)
    assert stage.fetches.recomputed_tokens > 0
    assert stage.cache.peek(key) == 0
    while stage.disk.reads:
        stage.disk.finish_read()
    stage.collect(now)
    assert stage.copies == []
    assert stage.at_rest()


def test_a_request_that_ends_is_waited_for_no_more(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    stage.fetches.forget("r")
    assert len(stage.disk.cancelled) == 1
    stage.disk.finish_read()
    stage.collect()
    assert stage.copies == []
    assert stage.at_rest()


def test_whoever_asked_first_may_go_and_the_others_still_get_it(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("first", key)
    assert stage.consider("second", key)
    stage.fetches.forget("first")
    assert stage.disk.cancelled == []
    stage.disk.finish_read()
    stage.collect()
    stage.end_copy()
    assert not stage.consider("second", key)
    assert stage.cache.peek(key) == 40


def test_a_request_that_ends_while_its_pages_are_copied_leaves_them_cached(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    stage.disk.finish_read()
    stage.collect()
    stage.fetches.forget("r")
    stage.end_copy()
    assert stage.cache.peek(key) == 40
    assert stage.at_rest()


def test_somebody_who_computes_its_beginning_meanwhile_leaves_the_rest_to_be_copied(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    stage.compute(long_key(12))
    stage.disk.finish_read()
    stage.collect()
    assert stage.copies[0][1] == list(range(12, 40, PAGE))
    stage.end_copy()
    assert stage.fetches.fetched("r") == FetchedRange(12, 40)


def test_who_waited_with_others_for_what_did_not_come_computes_too(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("first", key)
    assert stage.consider("second", key)
    stage.disk.finish_read(size_tokens=0)
    stage.collect()
    assert not stage.consider("first", key)
    assert not stage.consider("second", key)


def test_somebody_who_computes_it_meanwhile_makes_the_fetch_unneeded(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    stage.compute(key)
    stage.disk.finish_read()
    stage.collect()
    assert stage.copies == []
    assert not stage.consider("r", key)
    assert stage.at_rest()


def test_so_many_are_read_at_once_and_the_others_have_their_turn(stage: Stage) -> None:
    keys = [long_key(8, first=first) for first in range(100, 1000, 100)]
    for number, key in enumerate(keys):
        stage.disk.keep(key)
        assert stage.consider(f"r{number}", key)
    assert len(stage.disk.reads) == MAX_READS
    while stage.disk.reads:
        stage.disk.finish_read()
        stage.collect()
        stage.end_copy()
        assert len(stage.disk.reads) <= MAX_READS
    assert [stage.cache.peek(key) for key in keys] == [8] * len(keys)


def test_memory_for_reads_is_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_fetches, "MAX_READING_BYTES", 6 * LAYOUT.page_bytes)
    stage = Stage()
    for first in (100, 200):
        stage.disk.keep(long_key(40, first=first))
        assert stage.consider(f"r{first}", long_key(40, first=first))
    (prefix,) = stage.disk.reads.values()
    assert prefix.size_tokens == 12
    stage.disk.finish_read()
    stage.collect()
    assert stage.disk.reads == {}  # what is being copied is in memory still
    stage.end_copy()
    stage.collect()
    assert len(stage.disk.reads) == 1


def test_a_fetch_takes_at_most_the_device(stage: Stage) -> None:
    stage.disk.keep(long_key(400))
    assert stage.consider("r", long_key(400))
    (prefix,) = stage.disk.reads.values()
    assert prefix.size_tokens == PAGES * PAGE


def test_pages_that_cannot_be_had_mean_computing(stage: Stage) -> None:
    key = long_key(40)
    stage.disk.keep(key)
    held = stage.device.allocate(PAGES - 4)
    assert held is not None
    assert stage.consider("r", key)
    stage.disk.finish_read()
    stage.collect()
    assert stage.copies == []
    assert not stage.consider("r", key)


def test_a_disk_that_is_slower_than_computing_is_read_no_more_until_it_may_be_quicker() -> None:
    engine = EngineRates(prefill_tokens_per_s=10_000.0)
    stage = Stage(engine)
    first = long_key(40)
    stage.disk.keep(first)
    assert stage.consider("first", first)  # nobody has measured yet
    stage.disk.finish_read(elapsed_s=0.4)
    stage.collect()
    stage.end_copy()
    assert stage.fetches.disk_ms_per_token == pytest.approx(10.0)
    second = long_key(40, first=500)
    stage.disk.keep(second)
    assert not stage.consider("second", second)
    asked = 0
    while not stage.consider(f"r{asked}", second):
        asked += 1
    assert 50 < asked < 500


def test_a_long_first_read_is_waited_for_as_long_as_it_may_take(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disk_fetches, "GUESSED_BYTES_PER_S", 40 * LAYOUT.page_bytes / PAGE
    )  # a second for 40 tokens
    stage = Stage()
    key = long_key(40)
    stage.disk.keep(key)
    assert stage.consider("r", key)
    assert stage.consider("r", key, 3.9)
    assert stage.fetches.waiting == ["r"]
    stage.collect(4.1)
    assert not stage.consider("r", key, 4.1)


def test_a_disk_that_hangs_holds_those_up_who_came_first_and_nobody_after(stage: Stage) -> None:
    for first in (100, 200, 300):
        stage.disk.keep(long_key(40, first=first))
    assert stage.consider("a", long_key(40, first=100))
    assert stage.consider("b", long_key(40, first=200))
    stage.collect(LEAST_WAIT_S)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        assert not stage.consider(name, long_key(40, first=first), LEAST_WAIT_S)
    while stage.disk.reads:  # it has come to
        stage.disk.finish_read()
    stage.collect(LEAST_WAIT_S)
    assert stage.consider("d", long_key(40, first=300), LEAST_WAIT_S)


def test_what_is_complete_on_the_host_goes_to_the_disk_and_is_held_meanwhile(stage: Stage) -> None:
    key = long_key(40)
    stage.compute(key)
    stage.back_up(key)
    assert list(stage.disk.writes.values()) == [key]
    assert stage.cache.host_protected_pages == 20
    stage.disk.finish_write()
    stage.collect()
    assert stage.at_rest()
    stage.back_up(key)  # all of it is there
    assert stage.disk.writes == {}
    assert stage.at_rest()


def test_what_had_no_room_is_written_later_in_order(stage: Stage) -> None:
    stage.disk.room = False
    keys = [long_key(8, first=first) for first in (100, 200, 300)]
    for key in keys:
        stage.compute(key)
        stage.back_up(key)
    assert len(stage.desk.writes) == 3
    stage.disk.room = True
    stage.collect()
    assert list(stage.disk.writes.values()) == keys


def test_more_than_may_wait_for_the_disk_is_dropped_and_counted(stage: Stage) -> None:
    stage.disk.room = False
    stage.desk.writes = DiskWrites(stage.cache.transfers, stage.disk, max_queued=1)
    for first in (100, 200):
        key = long_key(8, first=first)
        stage.compute(key)
        stage.back_up(key)
    assert stage.desk.counts().dropped_tokens == 8
    stage.disk.room = True
    stage.collect()
    assert list(stage.disk.writes.values()) == [long_key(8, first=100)]


def test_a_write_that_fails_frees_the_host_and_is_not_tried_for_ever(stage: Stage) -> None:
    key = long_key(40)
    stage.compute(key)
    stage.back_up(key)
    stage.disk.finish_write(size_tokens=0)
    stage.collect()
    assert stage.disk.writes == {}
    assert stage.at_rest()


def test_a_flush_while_host_pages_are_read_gives_them_back_at_the_end(stage: Stage) -> None:
    key = long_key(40)
    stage.compute(key)
    stage.back_up(key)
    stage.cache.flush()
    stage.desk.flushed()
    stage.check()
    assert stage.host.free_pages == 2 * PAGES - 20
    stage.disk.finish_write()
    stage.collect()
    assert stage.host.free_pages == 2 * PAGES


def test_any_order_of_events_leaves_nothing_held_and_nobody_waiting() -> None:
    chance = np.random.default_rng(5)
    for _ in range(30):
        stage, now = Stage(), 0.0
        keys = [
            long_key(int(size), first=int(first))
            for size, first in zip(chance.integers(8, 60, 6), chance.integers(0, 3, 6) * 1000, strict=True)
        ]
        for key in keys[:3]:
            stage.disk.keep(key)
        for turn in range(40):
            now += 0.2
            key = keys[int(chance.integers(0, 6))]
            match int(chance.integers(0, 7)):
                case 0 | 1:
                    stage.consider(f"r{turn}", key, now)
                case 2 if stage.disk.reads:
                    stage.disk.finish_read(int(chance.choice([0, 8, 4])) if chance.random() < 0.3 else None)
                case 3 if stage.copies:
                    stage.end_copy("no" if chance.random() < 0.3 else "", now)
                case 4:
                    stage.cache.evict(int(chance.integers(1, 20)))
                case 5 if stage.fetches.waiting:
                    stage.fetches.forget(stage.fetches.waiting[0])
                case 6 if chance.random() < 0.2:
                    stage.cache.flush()
                    stage.desk.flushed()
            stage.collect(now)
        while stage.disk.reads or stage.copies:
            if stage.disk.reads:
                stage.disk.finish_read()
            stage.collect(now)
            while stage.copies:
                stage.end_copy("", now)
        assert stage.fetches.waiting == []
        assert stage.at_rest()
