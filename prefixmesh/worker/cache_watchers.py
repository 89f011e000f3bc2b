"""Readers of a worker's cache: any number of routers that follow what it holds, each at its own pace.

The engine tells what happened (``CacheChanges``, with each step's events), and the books are kept here, in the front: so a snapshot never
stops the engine, and a reader costs it nothing. A reader is an async generator. It is handed the next message when it has taken the
last one, and in between nothing is kept for it but its place in the log: one that is so slow that the log has left it behind is ended
with OverloadedError, and neither the engine nor the other readers have waited for it.

    resume in the log --no--> snapshot, in parts --void: flush--> beginning of the new epoch
          |                        |                                     |
          +------------------------+----------> events, reports <--------+
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Final

from prefixmesh.cache.events import CacheSummary, Event
from prefixmesh.cache.packed_names import unpack_names
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import OverloadedError, PrefixmeshError
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.worker.messages import CacheChanges, Stats
from prefixmesh.worker.recent_stats import RecentStats
from prefixmesh.worker_report import PagePool, WorkerReport

_log = logging.getLogger(__name__)

MAX_READERS: Final = 64
"""Routers are few; each reader is woken at each change, which takes some 2 µs."""

PART_BLOCKS: Final = 4_096
"""Of a snapshot in one message: 32 kB, a fifth of a millisecond of the front's time."""

BATCH_EVENTS: Final = 256
BATCH_BLOCKS: Final = 8_192
"""Of events in one message, but for a single event that is larger: the front's loop answers others in between."""

REPORT_INTERVAL_S: Final = 0.5
"""Where the reader does not ask for another."""

LEAST_REPORT_INTERVAL_S: Final = 0.05
MOST_REPORT_INTERVAL_S: Final = 10.0
"""Bounds of what may be asked for: a report costs the engine a question, and a reader hears from silence that a worker is gone."""

_MS_PER_S: Final = 1000.0

Place = tuple[Epoch, int]
"""Epoch, and the sequence of the last event before it."""


class CacheWatchers:
    """The books of one engine's cache, and those who read them. One event loop owns it. ``close`` ends every reader."""

    def __init__(
        self,
        stats: RecentStats,
        new_epoch: Callable[[], Epoch],
        *,
        publisher: CachePublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``publisher`` stands in for one with small bounds in tests."""
        self._publisher = CachePublisher(new_epoch) if publisher is None else publisher
        self._stats = stats
        self._clock = clock
        self._awake: set[asyncio.Event] = set()
        self._end: PrefixmeshError | None = None

    def __len__(self) -> int:
        """Readers that are open."""
        return len(self._awake)

    def __repr__(self) -> str:
        return f"CacheWatchers({len(self)} readers, {self._publisher!r})"

    def on_changes(self, changes: CacheChanges) -> None:
        """Enter what happened in the engine's cache, and wake the readers. O(its fingerprints)."""
        apply_changes(changes, self._publisher)
        self._wake()

    def close(self, error: PrefixmeshError) -> None:
        """The engine is gone or about to be: every reader ends in ``error``, later ones at once. May be called again."""
        self._end = self._end or error
        self._wake()

    async def read(self, resume_from: Place | None, report_interval_s: float) -> AsyncGenerator[News]:
        """All that a reader must know to hold what the cache holds, for as long as it reads; see the module.

        ``report_interval_s`` is cut to the bounds; 0 means the default. Raises OverloadedError for one reader too many and for one
        that is too slow, and what ``close`` was given.
        """
        if len(self._awake) >= MAX_READERS:
            raise OverloadedError(f"{MAX_READERS} readers follow this worker's cache already")
        awake = asyncio.Event()
        self._awake.add(awake)
        try:
            place = resume_from
            if place is None or not self._can_resume(place):
                snapshot = self._publisher.open_snapshot()
                place = (snapshot.summary.epoch, snapshot.summary.sequence)
                with closing(snapshot):
                    while (part := snapshot.next_part(PART_BLOCKS)) is not None:
                        yield part
                if snapshot.void and place[0] == self._publisher.epoch:
                    raise OverloadedError("this reader took so long over its snapshot that it was given up")
                # Where a flush has made it void, the reader is told of that next.
            interval_s = report_interval_s or REPORT_INTERVAL_S
            reports = _Reports(
                min(max(interval_s, LEAST_REPORT_INTERVAL_S), MOST_REPORT_INTERVAL_S), self._clock
            )
            while True:
                self._check_open()
                awake.clear()
                is_due = reports.take_turn()
                # What follows is of one moment: the events up to it, and then the sums at it.
                place, events, summary = self._take(place)
                for batch in _batches(events):
                    yield batch
                if is_due:
                    self._stats.ask()  # for the next one: a busy engine answers late, and what is known of the cache must not wait
                    yield _report(summary, self._stats.last)
                elif not events:
                    await _wait(awake, reports.due_in_s())
        finally:
            self._awake.discard(awake)

    def _can_resume(self, place: Place) -> bool:
        return self._publisher.events_since(*place) is not None

    def _take(self, place: Place) -> tuple[Place, Sequence[Event], CacheSummary]:
        """What has happened since ``place``, and the sums after it."""
        publisher = self._publisher
        events: list[Event] = []
        if place[0] != publisher.epoch:
            events.append(publisher.beginning)
            place = (publisher.epoch, 0)
        since = publisher.events_since(*place)
        if since is None:
            _log.info("cache_reader_too_slow sequence=%d now=%d", place[1], publisher.sequence)
            raise OverloadedError("this reader was too slow: what it missed is not kept any more; begin anew")
        events += since
        summary = publisher.summary()
        return (summary.epoch, summary.sequence), events, summary

    def _check_open(self) -> None:
        if self._end is not None:
            raise type(self._end)(str(self._end))  # a fresh one each time: several readers raise it

    def _wake(self) -> None:
        for awake in self._awake:
            awake.set()


class _Reports:
    """When one reader's next report is due: at once, then at intervals."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._due = clock()

    def due_in_s(self) -> float:
        return max(self._due - self._clock(), 0.0)

    def take_turn(self) -> bool:
        """Whether a report is due now; then the next is due an interval from now."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._interval_s
        return True


def apply_changes(changes: CacheChanges, publisher: CachePublisher) -> None:
    """Tell a publisher what an engine's cache told its recorder, in the same order. O(fingerprints)."""
    for change in changes.changes:
        if change.kind == "cleared":
            publisher.cleared()
            continue
        names = unpack_names(change.fingerprints)
        if change.kind == "stored":
            parent = None if change.parent is None else Fingerprint(change.parent)
            publisher.stored(Tier(change.tier), parent, names)
        else:
            publisher.removed(Tier(change.tier), names)


def _batches(events: Iterable[Event]) -> Iterator[EventBatch]:
    """Messages of bounded size. A flush begins a message, so that each is of one epoch."""
    batch: list[Event] = []
    blocks = 0
    for event in events:
        size = len(getattr(event, "fingerprints", ()))
        is_full = len(batch) >= BATCH_EVENTS or blocks + size > BATCH_BLOCKS
        if batch and (is_full or batch[0].epoch != event.epoch):
            yield EventBatch(batch)
            batch, blocks = [], 0
        batch.append(event)
        blocks += size
    if batch:
        yield EventBatch(batch)


def _report(summary: CacheSummary, stats: Stats | None) -> WorkerReport:
    if stats is None:
        return WorkerReport(summary=summary)
    rate = stats.prefill_tokens_per_s
    return WorkerReport(
        summary=summary,
        device_pool=PagePool(
            total_pages=stats.total_pages,
            free_pages=stats.free_pages,
            evictable_pages=stats.evictable_pages,
            protected_pages=stats.protected_pages,
        ),
        running_requests=stats.running,
        queued_requests=stats.queued,
        uncached_tokens=stats.uncached_tokens,
        prefill_ms_per_token=_MS_PER_S / rate if rate > 0.0 else 0.0,
        decode_step_ms=stats.decode_step_ms,
    )


async def _wait(awake: asyncio.Event, at_most_s: float) -> None:
    try:
        async with asyncio.timeout(at_most_s):
            await awake.wait()
    except TimeoutError:
        pass
