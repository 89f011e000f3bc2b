"""Who of the waiting begins now: while there is a place, a share of the step, and pages enough for those who run to go on. Pure.

The order is the queue's; this is whether there is room.
"""

import math
from typing import Final, NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.worker.admission import AdmissionQueue, AdmissionRound
from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.output_estimate import OutputEstimate
from prefixmesh.worker.pages_ahead import Growth, most_needed
from prefixmesh.worker.prefill_share import share_out, would_get_on
from prefixmesh.worker.request import Request
from prefixmesh.worker.running_batch import RunningBatch
from prefixmesh.worker.scheduler_config import SchedulerConfig
from prefixmesh.worker.tiers.disk_fetches import DiskFetches

MAX_LOOKED_TOKENS: Final = 2**18
"""Of prompts that are looked for on the disk in one step: 20 ms. Thousands that wait after a restart, their prefix there, would else hold up
a step for seconds."""


class Admissions(NamedTuple):
    """What one step admitted, in order."""

    started: list[Request]
    roomless: Request | None
    """One that ran into others' floors with the whole pool to itself: nobody is left to give it room. It is still queued."""


class Admitter:
    """Moves requests from the queue to the batch."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvManager,
        batch: RunningBatch,
        queue: AdmissionQueue,
        estimate: OutputEstimate,
        fetches: DiskFetches | None = None,
    ) -> None:
        """``fetches`` sets those aside whose prefix comes from the disk."""
        self._config = config
        self._fetches = fetches
        self._kv = kv
        self._batch = batch
        self._queue = queue
        self._estimate = estimate
        self._pages_short = False
        """Nobody could be admitted for want of pages; asking again is idle until something changes."""

        self._looked_tokens = 0
        """Of prompts that were looked for on the disk in this step."""

        self._stalled: set[Request] = set()
        """Prefilling requests that got nothing of the last step."""

    def may_fit_now(self) -> None:
        """Pages came back, or somebody came who may need fewer."""
        self._pages_short = False

    def forget(self, request: Request) -> None:
        """It is fetched for no longer: it was admitted, or has ended. O(1)."""
        if self._fetches is not None:
            self._fetches.forget(request.request_id)

    def admit(self, now: float) -> Admissions:
        """Admit whom this step has room for. O(1) when it has none; else O(queue) at numpy's speed, and a few looks into the cache
        for each that is admitted."""
        started: list[Request] = []
        if self._has_no_room():
            return Admissions(started, None)
        self._looked_tokens = 0
        admissions = self._open_round()
        running = [self._growth(request) for request in self._batch]
        is_short = False
        while len(self._batch) < self._config.max_running_requests:
            request = admissions.pick()
            if request is None:
                break
            if self._is_fetched_for(request, now):
                admissions.set_aside(request)
                if self._looked_tokens < MAX_LOOKED_TOKENS:
                    continue
                is_short = False  # whoever was not looked at has its turn in the next step
                break
            gets_on = self._gets_on(request)
            if gets_on:
                expected = self.expected_pages(request)
                if self._kv.admit(request, self._reserve(request, expected, running), now):
                    admissions.took(request)
                    self._batch.add(request)
                    request.promised_pages = expected
                    self.forget(request)
                    running.append(self._growth(request))
                    started.append(request)
                    continue
                if not len(self._batch) and not self._kv.may_free_pages(now):
                    return Admissions(started, request)
                is_short = is_short or request.rescue_until is None or now >= request.rescue_until
            if not admissions.skip(request, too_long=not gets_on):
                break
        self._pages_short = is_short and not started
        return Admissions(started, None)

    def expected_pages(self, request: Request) -> int:
        """How many pages a request is expected to have at its end. O(window of the estimate)."""
        expected = self._estimate.total_tokens(request.output_tokens, request.max_tokens)
        return max(self._kv.pages_for(request.prompt_tokens + expected), request.pages)

    def deal_out(self) -> list[tuple[Request, int]]:
        """The prompts that get on in this step, once nobody is admitted any more, and by how many tokens each."""
        remaining = self._remaining()
        sizes = share_out(remaining, self._config.step_tokens) if self._config.is_chunked else remaining
        dealt = list(zip(self._batch.prefilling, sizes, strict=True))
        self._stalled = {request for request, size in dealt if not size}
        return [(request, size) for request, size in dealt if size]

    def _is_fetched_for(self, request: Request, now: float) -> bool:
        if self._fetches is None:
            return False

        def key() -> RadixKey:
            self._looked_tokens += request.length
            return request.match_key(self._kv.page_size)

        if self._fetches.consider(request.request_id, key, request.owner, now):
            return True
        request.fetched = self._fetches.fetched(request.request_id)
        return False

    def _has_no_room(self) -> bool:
        if not len(self._queue) or len(self._batch) >= self._config.max_running_requests:
            return True
        if self._pages_short and len(self._batch):
            return True
        return not self._has_share(1)

    def _open_round(self) -> AdmissionRound:
        if not self._config.shares_prefixes:
            return self._queue.open_round([], None)
        # Who got nothing of the last step is not waited for: computing it oneself is sooner.
        holders = [
            request
            for request in (*self._batch.loading, *self._batch.prefilling)
            if request not in self._stalled and self._kv.offers(request)
        ]
        return self._queue.open_round(holders, self._config.hold_min_tokens)

    def _remaining(self) -> list[int]:
        return [request.length - request.computed for request in self._batch.prefilling]

    def _gets_on(self, request: Request) -> bool:
        return self._has_share(request.length - self._queue.order.cached_tokens(request))

    def _has_share(self, newcomer: int) -> bool:
        remaining, budget = self._remaining(), self._config.step_tokens
        return (
            would_get_on(remaining, newcomer, budget) if self._config.is_chunked else sum(remaining) < budget
        )

    def _growth(self, request: Request) -> Growth:
        own = request.pages - request.matched_tokens // self._kv.page_size
        return Growth(request.promised_pages - request.pages, own)

    def _reserve(self, request: Request, expected_pages: int, running: list[Growth]) -> int:
        """Pages to leave for what those who run and this one are expected to generate. Nothing when it would be alone: it is served
        as far as it gets. O(running log running)."""
        if not running:
            return 0
        wanted = self._kv.pages_for(request.length)
        found = self._queue.order.cached_tokens(request) // self._kv.page_size
        growth = Growth(expected_pages - wanted, wanted - found)
        return math.ceil(self._estimate.caution * most_needed([*running, growth]))
