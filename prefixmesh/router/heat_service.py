"""``ListHeat``: what is replicated because it is hot, and by which bounds. For administrators; it changes nothing."""

import time
from collections.abc import Callable
from typing import Final

from prefixmesh.cache.namespace import short_digest
from prefixmesh.errors import AccessDeniedError
from prefixmesh.ids import Fingerprint
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.heat.adapters import AdapterUse
from prefixmesh.router.heat.tracker import HotPrefix
from prefixmesh.router.heat.watch import HeatWatch
from prefixmesh.router.routing import RouterCore
from prefixmesh.rpc.identity import ApiKeys, identify
from prefixmesh.rpc.status import AnyContext

MAX_ITEMS: Final = 64
"""Of each kind, the hottest first: as many prefixes are watched at most by default."""


class HeatService:
    """Answers from what a router watches."""

    def __init__(
        self,
        *,
        core: RouterCore,
        watch: HeatWatch,
        keys: ApiKeys | None,
        is_acting: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_acting``: whether it is this router that has wishes served; ``clock`` is the core's."""
        self._core = core
        self._watch = watch
        self._keys = keys
        self._is_acting = is_acting
        self._clock = clock

    async def ListHeat(  # noqa: N802  the service's own name
        self, message: pb.ListHeatRequest, context: AnyContext
    ) -> pb.ListHeatResponse:
        """The hottest prefixes and adapters that this router has seen, as of its last review."""
        if not identify(context.invocation_metadata(), self._keys).is_admin:
            raise AccessDeniedError("only an administrator's key may list what is hot")
        tracker, config = self._watch.tracker, self._watch.tracker.config
        prefixes = [self._prefix(one) for one in tracker.watched[:MAX_ITEMS]]
        adapters = [self._adapter(one) for one in tracker.adapters[:MAX_ITEMS]]
        return pb.ListHeatResponse(
            enabled=config.enabled,
            items=[*prefixes, *adapters],
            max_replicas=config.max_replicas,
            max_prefixes=config.max_prefixes,
            max_tokens=config.max_tokens,
            acting=self._is_acting(),
        )

    def _prefix(self, one: HotPrefix) -> pb.HotItem:
        return pb.HotItem(
            id=one.name,
            tokens=one.blocks * self._core.fleet.block_size,
            requests_per_s=one.requests_per_s,
            holders=self._holders(one.last),
            target=one.target,
            namespace_digest=short_digest(one.origin.namespace),
        )

    def _adapter(self, use: AdapterUse) -> pb.HotItem:
        return pb.HotItem(
            id=use.digest,
            is_adapter=True,
            requests_per_s=self._watch.tracker.requests_per_s(use, self._clock()),
            holders=sum(entry.has_resident(use.digest) for entry in self._core.registry.ready),
            target=use.target,
        )

    def _holders(self, last: Fingerprint) -> int:
        """Workers that say they hold a prefix on their device: names are chained, so its last block stands for all of it."""
        view = self._core.view
        slots = {followed.slot for _, followed in view}
        falls = view.find_told([last]).device
        return sum(fall.slots >> slot & 1 for fall in falls for slot in slots)
