"""``Abort`` of a request that does not pass through this router: sent on to the worker that has it."""

from prefixmesh.ids import RequestId, TenantId
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_aborts import WorkerAborts


class DirectAborts:
    """Aborts requests that were placed by tickets."""

    def __init__(self, core: RouterCore, aborts: WorkerAborts) -> None:
        self._core = core
        self._aborts = aborts

    async def abort(self, request_id: RequestId, tenant: TenantId) -> None:
        """Stop a request of this tenant; what is unknown, over, or another tenant's is left alone, silently."""
        placement = self._core.placed_by_ticket(request_id)
        if placement is not None:
            await self._aborts.abort(placement, tenant)
