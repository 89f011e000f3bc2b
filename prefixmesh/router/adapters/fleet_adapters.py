"""A router's part in the adapters of the whole fleet: what is wished, who may wish, and what becomes of it."""

from collections.abc import Callable

from prefixmesh.router.adapters.adapter_keeper import AdapterKeeper
from prefixmesh.router.adapters.adapter_roster import AdapterRoster
from prefixmesh.router.adapters.adapter_service import AdapterService
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.state_store import StateStore
from prefixmesh.router.worker_link import core_now
from prefixmesh.router.workers import WorkerPool
from prefixmesh.rpc.identity import ApiKeys


class FleetAdapters:
    """``start`` it once, ``close`` it at the end, before the workers' links and the store."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        pool: WorkerPool,
        roster: AdapterRoster,
        store: StateStore,
        keys: ApiKeys | None,
        clock: StoreClock,
        is_acting: Callable[[], bool],
    ) -> None:
        """``is_acting`` tells whether this router is the one that has workers do things, and ``clock`` is asked as long as it is."""
        self._roster = roster
        self.keeper = AdapterKeeper(
            registry=registry,
            pool=pool,
            roster=roster,
            store=store,
            clock=clock,
            now=core_now,
            is_acting=is_acting,
        )
        self.service = AdapterService(
            registry=registry, roster=roster, keeper=self.keeper, store=store, keys=keys, now=core_now
        )

    def start(self) -> None:
        """Follow the store from now on. Needs a running event loop; nobody waits."""
        self._roster.start(self.keeper.wake)
        self.keeper.start()

    async def close(self) -> None:
        """Follow it no more, and have nothing done."""
        await self.keeper.close()
        await self._roster.close()
