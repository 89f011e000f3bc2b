"""What a worker's reports say, and when each reader is due one: at intervals, and soon after the load has changed.

A report says of the cache what the books say at that moment, of the load what the front knows, and of rates and pools what the engine told
last. Changes of the load are told in bundles: the first after a quiet time at once, the next not sooner than a bundle's time after it.
"""

from collections.abc import Callable
from typing import Final, Protocol

from prefixmesh.cache.events import CacheSummary
from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.worker.engine_stats import Stats, TierCounts
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.router_requests import OwnReader
from prefixmesh.worker_report import PagePool, WorkerReport

REPORT_INTERVAL_S: Final = 0.5
"""Where the reader does not ask for another."""

LEAST_REPORT_INTERVAL_S: Final = 0.05
MOST_REPORT_INTERVAL_S: Final = 10.0
"""Bounds of what may be asked for. A report costs the engine a question, and a reader hears from silence that a worker is gone."""

BUNDLES_PER_INTERVAL: Final = 2
"""A load that changes all the time is told so often: a reader of many workers knows by its interval how much it will get at most."""

RESTS_PER_INTERVAL: Final = 4
"""Messages of events that follow each other, at most, by the same reasoning. A router misses nothing meanwhile: it has predictions for what
it has sent itself, and a report that a request has ended is told after all that came before."""

MOST_REST_S: Final = 0.1
"""However seldom a reader wants reports: the log keeps a second's events of a busy cache, or less, and a reader must not fall behind it."""

_NOTHING_TOLD: Final = Stats(
    running=0,
    queued=0,
    total_pages=0,
    free_pages=0,
    evictable_pages=0,
    protected_pages=0,
    prefill_tokens_per_s=0.0,
    decode_step_ms=0.0,
    cache=LedgerRow(0, 0, Hits(), Misses()),
    double_releases=0,
    steps=0,
)
"""Before the engine's first answer."""


class ReportPace:
    """When one reader's next report is due. Pure but for the clock it is given."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        """``interval_s`` is cut to the bounds; 0 means the default."""
        wanted_s = interval_s or REPORT_INTERVAL_S
        self._interval_s = min(max(wanted_s, LEAST_REPORT_INTERVAL_S), MOST_REPORT_INTERVAL_S)
        self._bundle_s = max(self._interval_s / BUNDLES_PER_INTERVAL, LEAST_REPORT_INTERVAL_S)
        self.rest_s = min(self._interval_s / RESTS_PER_INTERVAL, MOST_REST_S)
        """Seconds from one message of events to the next."""

        self._clock = clock
        self._due = self._soonest = clock()
        self.has_news = False
        """The load has changed since the last report. Set by whoever notices; a report clears it."""

    def due_in_s(self) -> float:
        """Seconds until a report is due, as things are now."""
        return max((self._soonest if self.has_news else self._due) - self._clock(), 0.0)

    def take_turn(self) -> bool:
        """Whether a report is due now; if so, it must be made at once."""
        now = self._clock()
        if now < (self._soonest if self.has_news else self._due):
            return False
        self.has_news = False
        self._due, self._soonest = now + self._interval_s, now + self._bundle_s
        return True


class EngineFigures(Protocol):
    """What the engine has told of itself: ``RecentStats``, or a simulation's."""

    @property
    def last(self) -> Stats | None:
        """What was told last; None before the first answer."""
        ...

    @property
    def mark(self) -> float:
        """The moment of the question that ``last`` answers (``FrontLoad.mark``)."""
        ...


class ReportMaker:
    """Makes the reports of one worker."""

    def __init__(
        self,
        stats: EngineFigures,
        load: FrontLoad,
        is_draining: Callable[[], bool],
        unix_ms: Callable[[], int],
        copy_ms_per_token: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``copy_ms_per_token`` is what copying KV from other workers takes now; 0 where that cannot be."""
        self._copy_ms_per_token = copy_ms_per_token
        self._stats = stats
        self._load = load
        self._is_draining = is_draining
        self._unix_ms = unix_ms

    def make(self, summary: CacheSummary, own: OwnReader) -> WorkerReport:
        """The report for one reader. O(what it is told of its requests). Raises OverloadedError as ``OwnReader.take``."""
        load, stats = self._load, self._stats
        told, engine = own.take(), stats.last or _NOTHING_TOLD
        return WorkerReport(
            summary=summary,
            device_pool=PagePool(
                total_pages=engine.total_pages,
                free_pages=engine.free_pages,
                evictable_pages=engine.evictable_pages,
                protected_pages=engine.protected_pages,
            ),
            host_pool=host_pool_of(engine.tiers),
            running_requests=load.running,
            queued_requests=load.queued,
            uncached_tokens=load.uncached_tokens(engine.uncached_tokens, stats.mark),
            uncached_squares=load.uncached_squares(engine.uncached_squares, stats.mark),
            answer_tokens=engine.answer_tokens,
            token_interval_ms=engine.token_interval_ms,
            prefill_ms_per_token=engine.prefill_ms_per_token,
            prefill_ms_per_token2=engine.prefill_ms_per_token2,
            rated_prefills=engine.rated_prefills,
            decode_step_ms=engine.decode_step_ms,
            load_back_ms_per_token=engine.load_back_ms_per_token,
            copy_ms_per_token=self._copy_ms_per_token(),
            pins_version=engine.pins.version,
            adapter_load_ms=engine.adapter_load_ms,
            resident_adapters=engine.resident_adapters,
            draining=self._is_draining(),
            unix_ms=self._unix_ms(),
            accepted=told.accepted,
            prefilled=told.prefilled,
            ended=told.ended,
            own_requests=told.running,
        )


def host_pool_of(tiers: TierCounts) -> PagePool | None:
    """The host tier's pages; None where there is no host tier, or the engine has told nothing yet."""
    if not tiers.host_total_pages:
        return None
    return PagePool(
        total_pages=tiers.host_total_pages,
        free_pages=tiers.host_free_pages,
        evictable_pages=tiers.host_evictable_pages,
        protected_pages=tiers.host_protected_pages,
    )
