"""Our router in a replay: the real ``RouterCore`` (index, views, predictions, reservations, cost) told what real workers would tell.

Each worker's news are events of its cache, numbered, in the order in which things happen, and a report a tenth of a second after the first
thing that it does not tell of yet, later where a router of so many workers asks for fewer, or after a second without any. They arrive at
once. What passes through a router it sees itself: when a request begins, has its first token and ends. A view that is not the cache raises
InvariantError, as its own proof finds it. Several routers hear the same of caches, each of its own requests, and of one another's nothing
but what reports count.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from random import Random
from time import thread_time
from typing import Final

from prefixmesh.cache.events import CacheSummary, Event, Removed, SnapshotPart, Stored
from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Epoch, Incarnation, RequestId, WorkerId
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import Placement, RouteRequest
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.report_interval import REPORT_INTERVAL_S, REPORTS_PER_INTERVAL, report_interval_s
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_identity import Expected, Rates, WorkerFacts
from prefixmesh.router.worker_view import Need
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.replay_cache import Change
from prefixmesh.sim.replay_job import Job
from prefixmesh.sim.replay_routers import ReplayRouter
from prefixmesh.sim.replay_worker import ReplayWorker
from prefixmesh.sim.timing import TimingModel
from prefixmesh.worker_report import PagePool, WorkerReport

SILENT_REPORT_S: Final = 1.0
"""A worker of which nothing is new reports so often here, which is often enough to be believed."""

REVIEW_S: Final = 0.25
"""How often time alone is looked at, as the real shell does."""

MAX_INDEX_BLOCKS: Final = 4_000_000
"""More than any fleet that is replayed holds: what a bound costs is another question."""

_REVISION: Final = "replayed"
_EPOCH: Final = Epoch(1)
_ANSWER_MEAN_WEIGHT: Final = 0.05
"""Of the newest in the mean length of answers: some twenty count."""


class CoreRouter:
    """See the module. ``policy`` may name any of the router's own policies. It knows every ``routed_every``-th block of a workload."""

    def __init__(
        self,
        sim: Simulation,
        workers: Sequence[ReplayWorker],
        policy: PolicyConfig,
        rng: Random,
        *,
        block_size: int,
        routed_every: int,
        chunk_tokens: int,
        adapters: Collection[str] = (),
    ) -> None:
        """``adapters``: all that requests name, each of which every worker has, in memory or not; none where loads take no time."""
        self._sim = sim
        self._every = routed_every
        # A name and a content are the same here.
        self._adapters = {name: name for name in sorted(adapters)}
        self.decisions_s = array("d")
        """Of this machine's time, each."""

        self.core = RouterCore(
            Expected(
                model_revision=_REVISION,
                tokenizer_digest=_REVISION,
                protocol_version=PROTOCOL_VERSION,
                fingerprint_version=FINGERPRINT_VERSION,
                block_size=block_size,
            ),
            policy,
            block_size=block_size,
            max_tree_blocks=MAX_INDEX_BLOCKS,
            draw=lambda: rng.getrandbits(64),
        )
        self._placements: dict[int, Placement] = {}
        self._news = [
            _WorkerNews(
                sim,
                self.core,
                worker,
                block_size,
                block_size // routed_every,
                chunk_tokens,
                place,
                self._adapters,
                report_interval_s(len(workers)),
            )
            for place, worker in enumerate(workers)
        ]
        self._place_of = {news.endpoint: place for place, news in enumerate(self._news)}
        sim.call_later(REVIEW_S, self._review)

    def route(self, job: Job) -> int:
        """See ``ReplayRouter.route``."""
        request, every = job.request, self._every
        adapter = self._adapters.get(request.adapter, "")
        asked = RouteRequest(
            fingerprints=job.names[every - 1 :: every],
            prompt_tokens=request.input_length,
            max_tokens=request.output_length,
            adapter=adapter,
            adapter_digest=adapter,
        )
        request_id, now = RequestId(str(job.number)), self._sim.now
        began = thread_time()
        placement = self.core.route(asked, now, request_id=request_id)
        self.decisions_s.append(thread_time() - began)
        self._placements[job.number] = placement
        place = self._place_of[placement.endpoint]
        self._news[place].sent()
        return place

    def begun(self, job: Job) -> None:
        """See ``Listener.begun``."""
        self.core.accepted(self._placements[job.number], job.cached_tokens, self._sim.now)
        self._news[job.worker].begun(job)

    def first_token(self, job: Job) -> None:
        """See ``Listener.first_token``."""
        self.core.first_token(self._placements[job.number], self._sim.now)
        self._news[job.worker].first_token(job)

    def ended(self, job: Job) -> None:
        """See ``Listener.ended``."""
        left = job.left_names[self._every - 1 :: self._every]
        named = [left] if left else []
        self.core.finished(self._placements.pop(job.number), self._sim.now, named)
        self._news[job.worker].ended(job)

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """See ``Listener.changed``."""
        self._news[worker].changed(changes)

    def _review(self) -> None:
        self.core.tick(self._sim.now)
        self.core.view.take_changes()
        self._sim.call_later(REVIEW_S, self._review)


class SeveralRouters(ReplayRouter):
    """One router or more, each of which gets every so manieth request."""

    def __init__(self, routers: Sequence[CoreRouter]) -> None:
        self.cores = [router.core for router in routers]
        self._routers = routers
        self._turn = -1
        self._router_of: dict[int, CoreRouter] = {}

    def route(self, job: Job) -> int:
        """See ``ReplayRouter.route``."""
        self._turn += 1
        router = self._routers[self._turn % len(self._routers)]
        self._router_of[job.number] = router
        return router.route(job)

    def decisions_s(self) -> list[float]:
        """See ``ReplayRouter.decisions_s``."""
        return [one for router in self._routers for one in router.decisions_s]

    def begun(self, job: Job) -> None:
        """See ``Listener.begun``."""
        self._router_of[job.number].begun(job)

    def first_token(self, job: Job) -> None:
        """See ``Listener.first_token``."""
        self._router_of[job.number].first_token(job)

    def ended(self, job: Job) -> None:
        """See ``Listener.ended``."""
        self._router_of.pop(job.number).ended(job)

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """See ``Listener.changed``."""
        for router in self._routers:
            router.changed(worker, changes)


class _WorkerNews:
    """What one worker tells one router."""

    def __init__(
        self,
        sim: Simulation,
        core: RouterCore,
        worker: ReplayWorker,
        block_size: int,
        page_size: int,
        chunk_tokens: int,
        place: int,
        adapters: Mapping[str, str],
        interval_s: float,
    ) -> None:
        self.endpoint = Endpoint(f"worker-{place}")
        self._sim = sim
        self._core = core
        self._worker = worker
        self._block_size = block_size
        self._page_size = page_size
        self._adapters = adapters
        self._rates = _rates(worker.timing, chunk_tokens)
        self._incarnation = Incarnation(place + 1)
        self._sequence = 0
        self._accepted: list[str] = []
        self._prefilled: list[str] = []
        self._ended: list[str] = []
        self._answer_tokens = 0.0
        self._own = 0
        self._soon_s = max(REPORT_INTERVAL_S, interval_s / REPORTS_PER_INTERVAL)
        self._silent_s = max(SILENT_REPORT_S, interval_s)
        now = sim.now
        core.add_worker(self.endpoint, now)
        core.described(self.endpoint, self._facts(place), now)
        core.health_changed(self.endpoint, serving=True)
        core.fleet.opened(self.endpoint, interval_s, now)
        self._tell(SnapshotPart(_EPOCH, 0, Tier.DEVICE, (), last=True))
        self._is_soon = False
        self._timer: Timer
        self._report()

    def sent(self) -> None:
        """One more of the router's own is there."""
        self._own += 1

    def begun(self, job: Job) -> None:
        """See ``Listener``; so with the next three."""
        self._accepted.append(str(job.number))
        self._report_soon()

    def first_token(self, job: Job) -> None:
        self._prefilled.append(str(job.number))
        self._report_soon()

    def ended(self, job: Job) -> None:
        self._own -= 1
        self._ended.append(str(job.number))
        length = job.request.output_length
        share = _ANSWER_MEAN_WEIGHT if self._answer_tokens else 1.0
        self._answer_tokens += share * (length - self._answer_tokens)
        self._report_soon()

    def changed(self, changes: Sequence[Change]) -> None:
        events: list[Event] = []
        for change in changes:
            if change.came:
                self._sequence += 1
                came = tuple(change.came)
                events.append(Stored(_EPOCH, self._sequence, change.tier, change.parent, came))
            if change.went:
                self._sequence += 1
                events.append(Removed(_EPOCH, self._sequence, change.tier, tuple(change.went)))
        if events:
            self._tell(EventBatch(events))
            self._report_soon()

    def _tell(self, news: News) -> None:
        need = self._core.stream_news(self.endpoint, self._incarnation, news, self._sim.now)
        if need is not Need.NOTHING:
            raise InvariantError(
                f"the router's view of {self.endpoint} is not its cache: {self._core.view!r}"
            )

    def _report_soon(self) -> None:
        if not self._is_soon:
            self._is_soon = True
            self._timer.cancel()
            self._timer = self._sim.call_later(self._soon_s, self._report)

    def _report(self) -> None:
        worker, rates = self._worker, self._rates
        cache, adapters = worker.cache, worker.adapters
        in_use, free = cache.used_blocks, cache.free_blocks
        queued, step_ms = worker.queued, worker.step_ms
        report = WorkerReport(
            summary=CacheSummary(_EPOCH, self._sequence, (cache.state(Tier.DEVICE), cache.state(Tier.HOST))),
            device_pool=PagePool(
                total_pages=cache.total_blocks,
                free_pages=free,
                evictable_pages=cache.total_blocks - in_use - free,
                protected_pages=in_use,
            ),
            running_requests=worker.in_flight - queued,
            queued_requests=queued,
            uncached_tokens=round(worker.waiting_tokens),
            uncached_squares=round(worker.waiting_squares),
            answer_tokens=round(self._answer_tokens),
            token_interval_ms=step_ms,
            prefill_ms_per_token=rates.prefill_ms_per_token,
            prefill_ms_per_token2=rates.prefill_ms_per_token2,
            decode_step_ms=step_ms,
            load_back_ms_per_token=rates.load_back_ms_per_token,
            adapter_load_ms=0.0 if adapters is None else adapters.load_ms,
            resident_adapters=() if adapters is None else adapters.resident,
            accepted=tuple(self._accepted),
            prefilled=tuple(self._prefilled),
            ended=tuple(self._ended),
            own_requests=self._own,
        )
        self._accepted, self._prefilled, self._ended = [], [], []
        self._is_soon = False
        self._tell(report)
        self._timer = self._sim.call_later(self._silent_s, self._report)

    def _facts(self, place: int) -> WorkerFacts:
        return WorkerFacts(
            worker_id=WorkerId(self.endpoint),
            incarnation=self._incarnation,
            model=_REVISION,
            model_revision=_REVISION,
            tokenizer_digest=_REVISION,
            protocol_version=PROTOCOL_VERSION,
            fingerprint_version=FINGERPRINT_VERSION,
            context_length=1 << 30,
            max_running_requests=0,
            match_unit=1,
            page_size=self._page_size,
            block_size=self._block_size,
            total_tokens=self._worker.cache.total_blocks * self._page_size,
            rates=self._rates,
            adapters=self._adapters,
        )


def _rates(timing: TimingModel, chunk_tokens: int) -> Rates:
    """What a worker of such timing measures of itself: its prefill's curve has the steps' own time in it."""
    linear = timing.prefill_ms_per_token + timing.step_ms / chunk_tokens
    return Rates(
        prefill_tokens_per_s=1e3 / linear if linear else 0.0,
        decode_step_ms=timing.decode_step_ms(1, 1),
        prefill_ms_per_token=linear,
        prefill_ms_per_token2=timing.prefill_ms_per_token2,
        load_back_ms_per_token=timing.load_back_ms_per_token,
    )
