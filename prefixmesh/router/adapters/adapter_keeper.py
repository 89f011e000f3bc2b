"""The loop that sees to it that workers have the adapters that are wished: it gathers what is seen, asks the controller, and has done what that
orders.

Every router runs it, so that each can tell who has what; only the one that acts for the fleet (by the lease that pins are kept by, too:
one router that has workers do things is enough, and easier to follow) has anything done. It waits for nobody, and no request waits for it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from prefixmesh.errors import PrefixmeshError
from prefixmesh.router.adapters.adapter_actions import AdapterActions
from prefixmesh.router.adapters.adapter_roster import AdapterRoster
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.controller import AdapterController
from prefixmesh.router.adapters.orders import Ended, Order, WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord, encode, found
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.state_store import StateStore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.workers import WorkerPool

_log = logging.getLogger(__name__)

ROUND_S: Final = 0.25
"""Between two rounds at most: so late it is seen that a worker has come."""

LEAST_GAP_S: Final = 0.02
"""And at least: many changes at once are one."""

MOST_SHARE: Final = 0.1
"""Of the loop's time that rounds may take: with very many names and workers they come less often."""


WORKERS_AT_A_TIME: Final = 16
"""Looked at before others on the loop have their turn: of a thousand names each, some milliseconds."""


class AdapterKeeper:
    """``start`` it once, ``close`` it at the end."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        pool: WorkerPool,
        roster: AdapterRoster,
        store: StateStore,
        clock: StoreClock,
        now: Callable[[], float],
        is_acting: Callable[[], bool],
        config: AdapterControllerConfig | None = None,
    ) -> None:
        """``now`` is the controller's clock; ``is_acting`` tells whether this router is the one that has workers do things."""
        self._registry = registry
        self._roster = roster
        self._store = store
        self._clock = clock
        self._now = now
        self._is_acting = is_acting
        self._config = config or AdapterControllerConfig()
        self._changed = asyncio.Event()
        self.controller = AdapterController(self._config)
        self._actions = AdapterActions(pool, self._config, self._note_end)
        self._was_acting = False
        self._spent_s = 0.0
        """By the last round, of the loop's time."""

        self._running: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_acting(self) -> bool:
        """Whether this router is the one that has workers load and forget. O(1)."""
        return self._is_acting()

    def wake(self) -> None:
        """Something has changed: look at once."""
        self._changed.set()

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._running = asyncio.create_task(self._run(), name="adapter-keeper")

    async def close(self) -> None:
        """Have nothing done any more."""
        tasks = [task for task in (self._running, self._writing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._actions.close()

    async def _run(self) -> None:
        while True:
            self._spent_s = 0.0
            try:
                await self._round()
            except Exception:  # a bug of ours: what was ordered goes on, and the next round may find it well
                _log.exception("adapters_round_failed")
            gap_s = max(LEAST_GAP_S, self._spent_s / MOST_SHARE)
            await asyncio.sleep(gap_s)
            await self._until_changed(max(0.0, ROUND_S - gap_s))

    async def _until_changed(self, patience_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._changed.wait()

    async def _round(self) -> None:
        """See, decide, have done. O(1) where no adapter was ever put, else as the controller's step."""
        self._changed.clear()
        self._begin_term()
        records = self._roster.records if self._roster.is_read else None
        # Some at a time, so that others on the loop have their turn; what has changed meanwhile is looked at in the step.
        for start in range(0, len(self._registry) if records else 0, WORKERS_AT_A_TIME):
            began = self._now()
            some = islice(self._registry, start, start + WORKERS_AT_A_TIME)
            self.controller.look(self._roster.records, [see(entry) for entry in some if entry.facts])
            self._spent_s += self._now() - began
            await asyncio.sleep(0)
        began = self._now()
        self._step()
        self._spent_s += self._now() - began

    def _begin_term(self) -> None:
        """Whoever acts anew goes by what it sees, and by nothing that was ordered in another term."""
        if self.is_acting != self._was_acting:
            self._was_acting = not self._was_acting
            self.controller = AdapterController(self._config)

    def _step(self) -> None:
        acts = self._was_acting and self.is_acting
        records = self._roster.records if self._roster.is_read else None
        workers = [see(entry) for entry in self._registry if entry.facts] if records else []
        self._actions.begin(self.controller.step(self._now(), records, workers, acts=acts))
        if acts:
            self._write()

    def _note_end(self, order: Order, ended: Ended) -> None:
        self.controller.ended(order, ended, self._now())  # one of another term it does not know
        self.wake()

    def _write(self) -> None:
        """Tell the store what was found out, and what needs to be remembered no more."""
        if self._writing is not None and not self._writing.done():
            return
        news = self.controller.found()
        over = [one for one in self._roster.records.values() if one.is_over(self._clock.unix_ms)]
        if news or over:
            self._writing = asyncio.create_task(self._write_all(news, over))

    async def _write_all(self, news: Sequence[AdapterRecord], over: Sequence[AdapterRecord]) -> None:
        try:
            for record in news:
                await self._write_found(record)
            for record in over:
                await self._store.delete(record.key, expect=self._roster.version(record.name))
        except (PrefixmeshError, KeyError):
            await asyncio.sleep(
                ROUND_S
            )  # the store is gone, or another has written: what is found out is known here all the same

    async def _write_found(self, record: AdapterRecord) -> None:
        known = self._roster.records.get(record.name)
        if known is None or known.digest or found(known, record.digest) != record:
            return  # it was put again meanwhile
        version = await self._store.put(record.key, encode(record), expect=self._roster.version(record.name))
        if version is not None:
            self._roster.take(record, version)
            _log.info(
                "adapter_found name=%s generation=%d digest=%s",
                record.name,
                record.generation,
                record.digest,
            )


def see(entry: WorkerEntry) -> WorkerSeen:
    """A worker that has answered, as the controller goes by it. O(1) for each of its adapters, no more."""
    facts = entry.facts
    assert facts is not None
    return WorkerSeen(
        endpoint=entry.endpoint,
        incarnation=facts.incarnation,
        is_ready=entry.ready,
        is_reachable=not entry.unreachable,
        adapters=facts.adapters,
        pinned=facts.pinned_adapters,
    )
