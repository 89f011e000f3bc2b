"""``Abort`` calls of this router to workers, over connections of their own: of requests whose stream is not here, or whose stream says
nothing, so that ending it may not be heard either."""

import asyncio
import logging
from typing import Final

import grpc.aio

from prefixmesh.cache.namespace import NAMESPACE_BYTES
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Namespace, TenantId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc
from prefixmesh.router.placement import Placement
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_channel
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign

_log = logging.getLogger(__name__)

ABORT_TIMEOUT_S: Final = 5.0
"""A worker answers at once; one that does not has other troubles than this request."""


class WorkerAborts:
    """Sends aborts. ``close`` it at the end."""

    def __init__(self, secret: FleetSecret) -> None:
        self._secret = secret
        self._sending: set[asyncio.Task[None]] = set()

    def send(self, placement: Placement, tenant: TenantId) -> None:
        """Stop the placement's request at its worker, in the background. Needs a running event loop."""
        task = asyncio.create_task(self.abort(placement, tenant))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def abort(self, placement: Placement, tenant: TenantId) -> None:
        """Stop the placement's request at its worker; one that is not reached in time is logged, and no error."""
        # The worker compares the tenant. It is a router's own note, for this call: a caller never sees it.
        note = Ticket(
            request_id=placement.request_id,
            tenant=tenant,
            namespace=Namespace(bytes(NAMESPACE_BYTES)),
            incarnation=placement.incarnation,
        )
        async with open_channel(placement.endpoint, WORKER_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Abort(
                    pb.AbortRequest(request_id=placement.request_id),
                    metadata=((TICKET_METADATA, sign(note, self._secret)),),
                    timeout=ABORT_TIMEOUT_S,
                )
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "abort_not_delivered request_id=%s worker=%s problem=%r",
                    placement.request_id,
                    placement.endpoint,
                    error.details(),
                )

    async def close(self) -> None:
        """Send no more; those on their way are given up."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
