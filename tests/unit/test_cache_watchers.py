"""The books in a worker's front, and what one reader meets: snapshots that a flush overtakes, a log that has left it behind."""

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from prefixmesh.cache.event_log import LOG_BLOCKS
from prefixmesh.cache.events import SnapshotPart
from prefixmesh.cache.packed_names import pack_names
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.view import CacheView
from prefixmesh.errors import OverloadedError, UnavailableError
from prefixmesh.ids import Epoch, Fingerprint, RequestId
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.cache_watchers import (
    BATCH_EVENTS,
    MAX_READERS,
    PART_BLOCKS,
    CacheWatchers,
    apply_changes,
)
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.messages import CacheChange, CacheChanges, Stats
from prefixmesh.worker.recent_stats import RecentStats
from prefixmesh.worker.worker_reports import BUNDLES_PER_INTERVAL
from prefixmesh.worker_report import WorkerReport
from tests.support.cache_following import take_in
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio(loop_scope="function")


class Desk:
    """Watchers with few events in their log, over an engine that tells only what a test says."""

    def __init__(self, log_events: int = 1000, log_blocks: int = LOG_BLOCKS) -> None:
        self.rng = random.Random(7)
        self.publisher = CachePublisher(self.epoch, log_events=log_events, log_blocks=log_blocks)
        self.engine = ScriptedEngine()
        self.now = 0.0
        self.load = FrontLoad()
        self.watchers = CacheWatchers(
            RecentStats(self.engine, mark=self.load.mark),
            self.epoch,
            load=self.load,
            publisher=self.publisher,
            clock=lambda: self.now,
        )
        self.last_name = 0

    def epoch(self) -> Epoch:
        return Epoch(self.rng.getrandbits(64))

    def store(self, blocks: int = 1) -> None:
        """New blocks come, as one event."""
        names = [Fingerprint((self.last_name + i) * 2**40) for i in range(1, blocks + 1)]
        self.last_name += blocks
        self.tell(CacheChange("stored", Tier.DEVICE, None, pack_names(names)))

    def flush(self) -> None:
        self.tell(CacheChange("cleared"))

    def tell(self, change: CacheChange) -> None:
        self.watchers.on_changes(CacheChanges(changes=[change]))


async def test_snapshot_comes_in_parts_then_a_report_then_events() -> None:
    desk, view = Desk(), CacheView()
    desk.store(PART_BLOCKS + 5)
    reader = desk.watchers.read(None, 0.0)
    kinds = []
    for _ in range(3):
        news = await anext(reader)
        take_in(view, news)
        kinds.append(type(news))
    desk.store()
    take_in(view, news := await anext(reader))
    assert [*kinds, type(news)] == [SnapshotPart, SnapshotPart, WorkerReport, EventBatch]
    assert view.agrees(desk.publisher.summary())
    await reader.aclose()


async def test_what_comes_while_a_snapshot_is_read_follows_it() -> None:
    desk, view = Desk(), CacheView()
    desk.store(PART_BLOCKS + 5)
    reader = desk.watchers.read(None, 0.0)
    take_in(view, await anext(reader))
    desk.store(3)
    while not view.agrees(desk.publisher.summary()):
        take_in(view, await anext(reader))
    assert view.state(Tier.DEVICE).count == PART_BLOCKS + 8
    await reader.aclose()


async def test_flush_makes_a_snapshot_void_and_the_reader_begins_with_the_new_epoch() -> None:
    desk, view = Desk(), CacheView()
    desk.store(2 * PART_BLOCKS)
    reader = desk.watchers.read(None, 0.0)
    take_in(view, await anext(reader))
    desk.flush()
    desk.store(2)
    while not view.agrees(desk.publisher.summary()):
        take_in(view, await anext(reader))
    assert view.state(Tier.DEVICE).count == 2
    await reader.aclose()


async def test_idle_reader_is_told_of_a_flush_without_waiting_for_its_next_report() -> None:
    desk, view = Desk(), CacheView()
    desk.store(5)
    reader = desk.watchers.read(None, 10.0)
    for _ in range(2):
        take_in(view, await anext(reader))
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    desk.flush()
    take_in(view, await waiting)
    assert view.agrees(desk.publisher.summary())
    await reader.aclose()


async def test_reader_that_is_too_slow_is_ended_and_the_others_go_on() -> None:
    desk, view = Desk(log_events=4), CacheView()
    slow, quick = desk.watchers.read(None, 0.0), desk.watchers.read(None, 0.0)
    for reader in (slow, quick):
        await anext(reader)
        await anext(reader)
    view.load(SnapshotPart(desk.publisher.epoch, 0, Tier.DEVICE, (), True))
    for _ in range(6):
        desk.store()
        take_in(view, await anext(quick))
    with pytest.raises(OverloadedError, match="begin anew"):
        await anext(slow)
    assert view.agrees(desk.publisher.summary())
    assert len(desk.watchers) == 1
    await quick.aclose()


async def test_place_that_has_left_the_log_gets_a_snapshot() -> None:
    desk = Desk(log_events=2)
    place = (desk.publisher.epoch, 0)
    for _ in range(3):
        desk.store()
    reader = desk.watchers.read(place, 0.0)
    assert isinstance(await anext(reader), SnapshotPart)
    await reader.aclose()


async def test_many_events_travel_in_messages_of_bounded_size() -> None:
    desk, view = Desk(), CacheView()
    reader = desk.watchers.read((desk.publisher.epoch, 0), 0.0)
    view.load(SnapshotPart(desk.publisher.epoch, 0, Tier.DEVICE, (), True))
    for _ in range(2 * BATCH_EVENTS + 1):
        desk.store()
    sizes: list[int] = []
    while not view.agrees(desk.publisher.summary()):
        news: News = await anext(reader)
        take_in(view, news)
        if isinstance(news, EventBatch):
            sizes.append(len(news.events))
    assert sizes == [BATCH_EVENTS, BATCH_EVENTS, 1]
    await reader.aclose()


async def test_reports_come_at_the_interval_asked_for() -> None:
    desk = Desk()
    reader = desk.watchers.read((desk.publisher.epoch, 0), 2.0)
    assert isinstance(await anext(reader), WorkerReport)
    desk.store()
    assert isinstance(await anext(reader), EventBatch)
    desk.now = 1.9
    desk.store()
    assert isinstance(await anext(reader), EventBatch)
    desk.now = 2.0
    assert isinstance(await anext(reader), WorkerReport)
    await reader.aclose()


async def test_events_that_follow_each_other_closely_travel_together_and_hold_up_no_report() -> None:
    desk, interval_s = Desk(), 10.0
    reader = desk.watchers.read((desk.publisher.epoch, 0), interval_s)
    await anext(reader)
    desk.store()
    assert isinstance(await anext(reader), EventBatch), "the first is told at once"
    waiting = asyncio.ensure_future(anext(reader))
    for _ in range(3):
        desk.store()
        for _ in range(3):
            await asyncio.sleep(0)
    assert not waiting.done()
    desk.now = interval_s
    with desk.load.enter("r", RequestId("q"), 1):
        batch = await waiting
    assert isinstance(batch, EventBatch)
    assert len(batch.events) == 3
    assert isinstance(await anext(reader), WorkerReport)
    await reader.aclose()


async def test_report_tells_old_figures_while_the_engine_computes_a_long_step() -> None:
    desk = Desk()
    reader = desk.watchers.read((desk.publisher.epoch, 0), 1.0)
    await anext(reader)
    desk.engine.hold_stats = True
    desk.now = 1.0
    assert isinstance(await anext(reader), WorkerReport)
    desk.engine.hold_stats = False
    await reader.aclose()


async def test_change_of_the_load_is_told_at_once_and_the_engines_own_figures_when_they_come() -> None:
    """The answer to a question from before the change is not what the change is waited for with."""
    desk, interval_s = Desk(), 10.0
    questions: list[asyncio.Future[Stats]] = []
    figures = await desk.engine.stats()

    async def stats() -> Stats:
        questions.append(asyncio.get_running_loop().create_future())
        return await questions[-1]

    async def answer(steps: int) -> None:
        questions[-1].set_result(msgspec.structs.replace(figures, free_pages=steps))
        for _ in range(3):
            await asyncio.sleep(0)

    desk.engine.stats = stats  # type: ignore[method-assign]
    reader = desk.watchers.read((desk.publisher.epoch, 0), interval_s)
    assert await free_pages(reader) == 0
    await asyncio.sleep(0)
    desk.now += interval_s / BUNDLES_PER_INTERVAL
    with desk.load.enter("r", RequestId("q"), 1):
        assert await free_pages(reader) == 0, "what the front knows itself waits for nobody"
        desk.now += interval_s / BUNDLES_PER_INTERVAL
        await answer(1)
        waiting = asyncio.ensure_future(free_pages(reader))
        await asyncio.sleep(0)
        assert not waiting.done()
        await answer(2)
        assert await waiting == 2
    await reader.aclose()


async def free_pages(reader: AsyncIterator[News]) -> int:
    """Of the next report."""
    report = await anext(reader)
    assert isinstance(report, WorkerReport)
    return report.device_pool.free_pages


async def test_one_reader_too_many_is_refused_and_a_place_is_free_again_when_one_leaves() -> None:
    desk = Desk()
    readers = [desk.watchers.read((desk.publisher.epoch, 0), 0.0) for _ in range(MAX_READERS)]
    for reader in readers:
        await anext(reader)
    late = desk.watchers.read(None, 0.0)
    with pytest.raises(OverloadedError, match=str(MAX_READERS)):
        await anext(late)
    await readers[0].aclose()
    again = desk.watchers.read(None, 0.0)
    await anext(again)
    for reader in [*readers[1:], again]:
        await reader.aclose()
    assert len(desk.watchers) == 0


async def test_closing_ends_readers_that_wait_and_those_that_come() -> None:
    desk = Desk()
    reader = desk.watchers.read((desk.publisher.epoch, 0), 0.0)
    await anext(reader)
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    desk.watchers.close(UnavailableError("it is over"))
    with pytest.raises(UnavailableError, match="it is over"):
        await waiting
    with pytest.raises(UnavailableError, match="it is over"):
        await anext(desk.watchers.read((desk.publisher.epoch, 0), 0.0))


@pytest.mark.parametrize("seed", range(20))
async def test_recorded_changes_make_the_books_that_a_publisher_in_the_cache_would_have(seed: int) -> None:
    rng = random.Random(seed)
    recorder, near, far = CacheRecorder(), CachePublisher(lambda: Epoch(1)), CachePublisher(lambda: Epoch(1))
    held: list[Fingerprint] = []
    for _ in range(300):
        names = [Fingerprint(rng.getrandbits(64)) for _ in range(rng.randrange(1, 5))]
        gone = [held.pop(rng.randrange(len(held))) for _ in range(min(len(held), 2))]
        is_flush = rng.random() < 0.02
        for sink in (recorder, near):
            sink.stored(Tier.DEVICE, None, names)
            if gone:
                sink.removed(Tier.DEVICE, gone)
            if is_flush:
                sink.cleared()
        held = [] if is_flush else held + names
        if rng.random() < 0.3:
            apply_changes(CacheChanges(changes=recorder.take()), far)
            assert far.summary().states == near.summary().states
            assert far.state(Tier.DEVICE).count == len(held)
    far.check_invariants()
    recorder.take()
    assert recorder.take() == []
