"""The links to all workers: who is followed, and what is told when one becomes ready, is put out, or comes back.

What is known of the workers is the core's, and what goes to and fro between router and worker is each link's (``worker_link``). The calls
that run on a worker that is put out are given up here: nothing comes from it, and nothing else would end them.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.router.cache_stream import log_trust
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.readiness import PASSING_PROBLEMS
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_link import WorkerLink, core_now

_log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S: Final = 1.0
"""A request waits for these answers. A worker gives one within a fifth of a second, also while it computes."""

REVIEW_INTERVAL_S: Final = 0.25
"""How late it is noticed that a worker has become silent, or that a ticket is over."""


class WorkerPool:
    """The links to all workers. Owns which there are; what is known of them is the core's."""

    def __init__(
        self, core: RouterCore, secret: FleetSecret, router_id: str, on_change: Callable[[], None]
    ) -> None:
        """``router_id`` is what this router calls itself to workers; ``on_change`` is called whenever a worker's problem has changed."""
        self._core = core
        self._secret = secret
        self._router_id = router_id
        self._on_change = on_change
        self._links: dict[Endpoint, WorkerLink] = {}
        self._problems: dict[Endpoint, str] = {}
        self._news = core.registry.follow()
        self._spreads_over_all = False
        # Of workers that somebody waits to hear of: set, and forgotten, when a worker's problem is another, or it is removed.
        self._awaited: dict[Endpoint, asyncio.Event] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._reviewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look after what time alone brings about. Needs a running event loop."""
        self._reviewing = asyncio.create_task(self._review_often())

    def add(self, endpoint: Endpoint) -> bool:
        """Follow a worker from now on; False when it is followed already. Needs a running event loop."""
        if not self._core.add_worker(endpoint, core_now()):
            return False
        link = self._links[endpoint] = WorkerLink(
            endpoint, self._core, self._secret, self._router_id, self._note_news
        )
        link.start()
        return True

    def remove(self, endpoint: Endpoint) -> bool:
        """Send a worker nothing more; its running streams end undisturbed. False when it is not known."""
        if not self._core.remove_worker(endpoint):
            return False
        self._problems.pop(endpoint, None)
        self._wake(endpoint)
        task = asyncio.create_task(self._links.pop(endpoint).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        _log.info("worker_removed endpoint=%s", endpoint)
        self._note_news()
        self._on_change()
        return True

    def link(self, endpoint: Endpoint) -> WorkerLink:
        """The link to a worker that a decision has just named."""
        return self._links[endpoint]

    def find_link(self, endpoint: Endpoint) -> WorkerLink | None:
        """The link to a worker; None when it is not followed."""
        return self._links.get(endpoint)

    async def first_problem(self, endpoint: Endpoint, patience_s: float) -> str:
        """Why a worker is not sent requests, once that is no passing matter, or after ``patience_s``; empty when it is, or is not known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while (entry := self._core.registry.get(endpoint)) and entry.problem in PASSING_PROBLEMS:
                    await self._awaited.setdefault(endpoint, asyncio.Event()).wait()
        entry = self._core.registry.get(endpoint)
        return "" if entry is None else entry.problem

    async def hear_of_all(self, patience_s: float) -> None:
        """Return once it is known of every worker whether it is there, or after ``patience_s``."""
        await asyncio.gather(*(self.first_problem(endpoint, patience_s) for endpoint in list(self._links)))

    async def describe_ready(self) -> None:
        """Have every ready worker tell who it is, all at once. One that does not answer soon is left to its own link."""

        async def describe(link: WorkerLink) -> None:
            with suppress(PrefixmeshError):
                await link.describe(LOOKUP_TIMEOUT_S)

        await asyncio.gather(*(describe(self._links[entry.endpoint]) for entry in self._core.registry.ready))

    async def close(self) -> None:
        """Stop following everyone and wait for the last running calls, which the caller has ended."""
        if self._reviewing is not None:
            self._reviewing.cancel()
            await asyncio.wait({self._reviewing})
        for endpoint in list(self._links):
            self.remove(endpoint)
        await asyncio.gather(*self._closing)

    async def _review_often(self) -> None:
        while True:
            await asyncio.sleep(REVIEW_INTERVAL_S)
            try:
                self._core.tick(core_now())
                log_trust(self._core)
                self._note_news()  # a report may have said that its worker drains
            except Exception:  # a bug of ours: what comes by time must go on coming
                _log.exception("review_failed")

    def _note_news(self) -> None:
        """Tell of what has changed since the last call. O(workers that have)."""
        registry = self._core.registry
        if registry.spreads_over_all != self._spreads_over_all:
            self._spreads_over_all = registry.spreads_over_all
            self._log_spread(registry)
        news = self._news.take()
        changed = [entry for entry in news if self._problems.get(entry.endpoint) != entry.problem]
        for entry in changed:
            self._problems[entry.endpoint] = entry.problem
            self._tell(entry)
            self._wake(entry.endpoint)
        if changed:
            self._on_change()

    def _wake(self, endpoint: Endpoint) -> None:
        """Whoever waits for this worker looks again, and nobody else: thousands are waited for when a router starts."""
        awaited = self._awaited.pop(endpoint, None)
        if awaited is not None:
            awaited.set()

    def _tell(self, entry: WorkerEntry) -> None:
        if entry.ready:
            _log.info("worker_ready endpoint=%s worker_id=%s", entry.endpoint, entry.name)
        elif entry.ejected:
            _log.warning("worker_ejected endpoint=%s problem=%r", entry.endpoint, entry.problem)
            self._links[entry.endpoint].give_up_calls(f"worker {entry.name} {entry.problem}")
        else:
            level = logging.DEBUG if entry.problem in PASSING_PROBLEMS else logging.WARNING
            _log.log(level, "worker_not_ready endpoint=%s problem=%r", entry.endpoint, entry.problem)

    def _log_spread(self, registry: WorkerRegistry) -> None:
        event = "workers_spread_over_all" if self._spreads_over_all else "workers_spread_over_well"
        level = logging.WARNING if self._spreads_over_all else logging.INFO
        _log.log(level, "%s failing=%d of=%d", event, registry.failing, registry.otherwise_ready)
