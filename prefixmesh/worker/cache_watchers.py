"""Readers of a worker's cache: any number of routers that follow what it holds, each at its own pace.

The engine tells what happened (``CacheChanges``, with each step's events), and the books are kept here, in the front: so a snapshot never
stops the engine, and a reader costs it nothing. A reader is an async generator. It is handed the next message when it has taken the
last one, and in between nothing is kept for it but its place in the log: one that is so slow that the log has left it behind is ended
with OverloadedError, and neither the engine nor the other readers have waited for it.

    resume in the log --no--> snapshot, in parts --void: flush--> beginning of the new epoch
          |                        |                                     |
          +------------------------+----------> events, reports <--------+

A report is due at intervals, and soon after the load has changed (``worker_reports``). Events of a quiet cache are told at once, those of
a busy one in bundles: a message costs a router ten times what an event in it does, and has every worker's to read.
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
from prefixmesh.wall_clock import unix_ms
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.messages import CacheChanges
from prefixmesh.worker.recent_stats import RecentStats
from prefixmesh.worker.worker_reports import ReportMaker, ReportPace

_log = logging.getLogger(__name__)

MAX_READERS: Final = 64
"""Routers are few; each reader is woken at each change, which takes some 2 µs."""

PART_BLOCKS: Final = 1_024
"""Of a snapshot in one message: a reader takes it in without a break, which is 1 to 3 ms of its loop in a large index."""

BATCH_EVENTS: Final = 256
BATCH_BLOCKS: Final = 2_048
"""Of events in one message, but for a single event that is larger: both ends' loops answer others in between."""

Place = tuple[Epoch, int]
"""Epoch, and the sequence of the last event before it."""


class CacheWatchers:
    """The books of one engine's cache, and those who read them. One event loop owns it. ``close`` ends every reader."""

    def __init__(
        self,
        stats: RecentStats,
        new_epoch: Callable[[], Epoch],
        *,
        load: FrontLoad | None = None,
        is_draining: Callable[[], bool] = lambda: False,
        copy_ms_per_token: Callable[[], float] = lambda: 0.0,
        publisher: CachePublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``publisher`` stands in for one with small bounds in tests, which may leave out the load, too."""
        self._publisher = CachePublisher(new_epoch) if publisher is None else publisher
        self._stats = stats
        self._load = FrontLoad() if load is None else load
        self._reports = ReportMaker(stats, self._load, is_draining, unix_ms, copy_ms_per_token)
        self._clock = clock
        self._readers: set[_Reader] = set()
        self._awaits_answer = False
        self._end: PrefixmeshError | None = None
        self._load.on_change = self.on_load_change
        stats.on_answer = self._on_answer

    def __len__(self) -> int:
        """Readers that are open."""
        return len(self._readers)

    def __repr__(self) -> str:
        return f"CacheWatchers({len(self)} readers, {self._publisher!r})"

    def on_changes(self, changes: CacheChanges) -> None:
        """Enter what happened in the engine's cache, and wake the readers that do not rest. O(its fingerprints)."""
        apply_changes(changes, self._publisher)
        for reader in self._readers:
            if not reader.rests and not reader.reports_only:
                reader.awake.set()

    def on_load_change(self) -> None:
        """Have every reader told soon how busy the worker is. O(readers), and O(1) until they were told."""
        if self._note_news() and self._readers:
            self._stats.ask()  # so that the report tells the engine's own figures as well, or the next one does
            self._awaits_answer = True

    def close(self, error: PrefixmeshError) -> None:
        """The engine is gone or about to be: every reader ends in ``error``, later ones at once. May be called again."""
        self._end = self._end or error
        for reader in self._readers:
            reader.awake.set()

    async def read(
        self,
        resume_from: Place | None,
        report_interval_s: float,
        router_id: str = "",
        *,
        reports_only: bool = False,
    ) -> AsyncGenerator[News]:
        """All that a reader must know to hold what the cache holds, for as long as it reads; see the module. ``reports_only`` leaves the
        cache out: how busy the worker is, and no more.

        ``report_interval_s`` is cut to the bounds; 0 means the default. Reports tell of the requests of the router ``router_id``. Raises
        OverloadedError for one reader too many and for one that is too slow, and what ``close`` was given.
        """
        if len(self._readers) >= MAX_READERS:
            raise OverloadedError(f"{MAX_READERS} readers follow this worker's cache already")
        reader = _Reader(ReportPace(report_interval_s, self._clock), reports_only=reports_only)
        self._readers.add(reader)
        try:
            place = self._now() if reports_only else resume_from
            if place is None or not self._can_resume(place):
                snapshot = self._publisher.open_snapshot()
                place = (snapshot.summary.epoch, snapshot.summary.sequence)
                with closing(snapshot):
                    while (part := snapshot.next_part(PART_BLOCKS)) is not None:
                        yield part
                if snapshot.void and place[0] == self._publisher.epoch:
                    raise OverloadedError("this reader took so long over its snapshot that it was given up")
                # Where a flush has made it void, the reader is told of that next.
            with self._load.requests.follow(router_id) as own:
                while True:
                    self._check_open()
                    reader.awake.clear()
                    # What follows is of one moment: the events up to it, and then the sums at it.
                    report_is_due = reader.pace.take_turn()
                    if reports_only:
                        place = self._now()
                    place, events, summary = self._take(place)
                    reader.rests = bool(events)
                    report = self._reports.make(summary, own) if report_is_due else None
                    for batch in _batches(events):
                        yield batch
                    if report is not None:
                        self._stats.ask()  # for the next one: a busy engine answers late, and what is known of the cache must not wait
                        yield report
                    await reader.wait()
        finally:
            self._readers.discard(reader)

    def _can_resume(self, place: Place) -> bool:
        return self._publisher.events_since(*place) is not None

    def _now(self) -> Place:
        """Where there is nothing to be told of."""
        summary = self._publisher.summary()
        return summary.epoch, summary.sequence

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

    def _on_answer(self) -> None:
        """The engine has told its figures. What was asked for because of a change is told on; a question that a report asks is for the
        next one."""
        if self._awaits_answer:
            self._awaits_answer = False
            self._note_news()

    def _note_news(self) -> bool:
        """Make reports due soon; whether any was not already."""
        is_new = False
        for reader in self._readers:
            if not reader.pace.has_news:
                reader.pace.has_news = is_new = True
                reader.awake.set()
        return is_new


class _Reader:
    """What wakes one reader, and when it is due a report."""

    __slots__ = ("awake", "pace", "reports_only", "rests")

    def __init__(self, pace: ReportPace, *, reports_only: bool) -> None:
        self.reports_only = reports_only
        self.awake = asyncio.Event()
        self.pace = pace
        self.rests = False
        """It is being told of events, or was a moment ago: further ones do not wake it."""

    async def wait(self) -> None:
        """Until there is anything to tell, or the rest is over."""
        due_s = self.pace.due_in_s()
        try:
            async with asyncio.timeout(min(due_s, self.pace.rest_s) if self.rests else due_s):
                await self.awake.wait()
        except TimeoutError:
            pass


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
