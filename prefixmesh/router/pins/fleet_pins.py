"""A router's pins as a whole: what is wished, who may wish, and what becomes of it."""

from prefixmesh.cache.namespace import Isolation
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.model import RouterModel
from prefixmesh.router.pins.pin_keeper import HeatWishes, PinKeeper
from prefixmesh.router.pins.pin_prompts import PinPrompts
from prefixmesh.router.pins.pin_roster import PinRoster
from prefixmesh.router.pins.pin_service import PinService
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.state_store import StateStore
from prefixmesh.router.worker_link import core_now
from prefixmesh.router.workers import WorkerPool
from prefixmesh.rpc.identity import ApiKeys


class FleetPins:
    """``start`` it once, ``close`` it at the end, before the workers' links and the store."""

    def __init__(
        self,
        *,
        core: RouterCore,
        pool: WorkerPool,
        model: RouterModel,
        store: StateStore,
        public: PublicPrefixes,
        adapters: AdapterFinder,
        keys: ApiKeys | None,
        namespace_key: bytes,
        isolation: Isolation,
        block_size: int,
        router_id: str,
        heat: HeatWishes | None = None,
    ) -> None:
        """``public`` is told of the public pins; ``heat`` has wishes of its own, which are served like pins."""
        prompts = PinPrompts(model, namespace_key=namespace_key, isolation=isolation, block_size=block_size)
        clock = self.clock = StoreClock(store)
        self.roster = PinRoster(store, prompts, adapters.known, self._wake)
        self.keeper = PinKeeper(
            core=core,
            pool=pool,
            roster=self.roster,
            store=store,
            clock=clock,
            router_id=router_id,
            now=core_now,
            block_size=block_size,
            set_public=public.set,
            heat=heat,
        )
        self.service = PinService(
            roster=self.roster,
            prompts=prompts,
            adapters=adapters,
            store=store,
            keys=keys,
            clock=clock,
            keeper=self.keeper,
        )

    def start(self) -> None:
        """Follow the store from now on. Needs a running event loop; nobody waits."""
        self.roster.start()
        self.keeper.start()

    async def close(self) -> None:
        """Follow it no more, and let another router act."""
        await self.keeper.close()
        await self.roster.close()

    def _wake(self) -> None:
        self.keeper.wishes_changed()
