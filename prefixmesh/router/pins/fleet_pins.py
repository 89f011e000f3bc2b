"""A router's pins as a whole: what is wished, who may wish, and what becomes of it."""

from prefixmesh.cache.namespace import Isolation
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.model import RouterModel
from prefixmesh.router.pins.pin_prompts import PinPrompts
from prefixmesh.router.pins.pin_roster import PinRoster
from prefixmesh.router.pins.pin_service import PinService
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.state_store import StateStore
from prefixmesh.rpc.identity import ApiKeys


class FleetPins:
    """``start`` it once, ``close`` it at the end."""

    def __init__(
        self,
        *,
        core: RouterCore,
        model: RouterModel,
        store: StateStore,
        adapters: AdapterFinder,
        keys: ApiKeys | None,
        namespace_key: bytes,
        isolation: Isolation,
        block_size: int,
    ) -> None:
        prompts = PinPrompts(model, namespace_key=namespace_key, isolation=isolation, block_size=block_size)
        clock = StoreClock(store)
        self.roster = PinRoster(store, prompts, core.registry.adapter_digest)
        self.service = PinService(
            roster=self.roster,
            prompts=prompts,
            adapters=adapters,
            store=store,
            keys=keys,
            clock=clock,
            progress=lambda _: None,
        )

    def start(self) -> None:
        """Follow the store from now on. Needs a running event loop; nobody waits."""
        self.roster.start()

    async def close(self) -> None:
        """Follow it no more."""
        await self.roster.close()
