"""Requests whose prefix comes back from the host: when they join the steps, and what becomes of them if it does not come. Pure.

::

    admitted ──► loading ──► enough has come ──► prefilling, its last layers still on their way ──► all has come: its pages are shared
                    │                                   │
                    └── failed, late, or a flush ───────┴──► back before all that were never admitted, to compute instead
"""

from collections.abc import Callable

from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.plan_builder import Step
from prefixmesh.worker.prompt_order import PromptOrder
from prefixmesh.worker.request import Request
from prefixmesh.worker.running_batch import RunningBatch
from prefixmesh.worker.tiers.keeper import Keeper
from prefixmesh.worker.tiers.load_backs import Load

_MS_PER_S = 1000.0


class LoadBackDesk:
    """Between the keeper, which knows copies, and the batch, which knows requests."""

    def __init__(
        self,
        keeper: Keeper,
        kv: KvManager,
        batch: RunningBatch,
        order: PromptOrder,
        put_back: Callable[[Request, float], None],
        announce: Callable[[Request, float], None],
    ) -> None:
        """``put_back`` takes a request out of the batch and queues it before all that were never admitted; ``announce`` tells its caller of
        its admission, and how many milliseconds it was loading."""
        self._keeper = keeper
        self._kv = kv
        self._batch = batch
        self._order = order
        self._put_back = put_back
        self._announce = announce

    def join(self, rates: EngineRates, step_tokens: int, now: float) -> None:
        """Let those join the step for whom enough has come, and give up waiting for what does not. O(loading)."""
        for request in list(self._batch.loading):
            load = request.load
            size = min(request.length - request.computed, step_tokens)
            compute_ms = rates.prefill_ms(request.computed, request.computed + size)
            assert load is not None
            if self._keeper.may_begin(load, compute_ms, now):
                load.joined_at = now
                self._batch.start_prefilling(request)
            elif now >= load.wait_until:
                self._fail(request, now)

    def collect(self, now: float) -> bool:
        """Acknowledge the copies that have ended, let go on whom they were for, and begin others; returns whether pages may have come free.
        O(what has ended), and O(running) when a load-back has."""
        keeper = self._keeper
        ended_before = keeper.ended_copies
        ended = {load.number for load in keeper.collect(now)}
        for request in list(self._batch) if ended else ():
            if request.load is not None and request.load.number in ended:
                self._end(request, request.load, now)
        keeper.pump(now)
        return keeper.ended_copies > ended_before

    def void(self, step: Step, now: float) -> None:
        """A step has read KV that did not come: whoever still waits for a load-back computes instead."""
        for part in step.parts:
            if part.request.load is not None:
                self._fail(part.request, now)

    def _end(self, request: Request, load: Load, now: float) -> None:
        if load.error:
            self._fail(request, now)
            return
        page_size, before = self._kv.page_size, request.shared_pages
        self._kv.loaded(request, now)
        self._order.offered(request, before * page_size, request.shared_pages * page_size)
        self._batch.start_prefilling(request)
        if not request.is_announced:
            self._announce(request, load.waited_s(now) * _MS_PER_S)

    def _fail(self, request: Request, now: float) -> None:
        request.may_load = False
        self._put_back(request, now)
