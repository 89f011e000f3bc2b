"""``Abort`` of a request that does not pass through this router: sent on to the worker that has it."""

import logging
from typing import Final

import grpc.aio

from prefixmesh.cache.namespace import NAMESPACE_BYTES
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Namespace, RequestId, TenantId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc
from prefixmesh.router.routing import RouterCore
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_channel
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign

_log = logging.getLogger(__name__)

ABORT_TIMEOUT_S: Final = 5.0
"""A worker answers at once; one that does not has other troubles than this request."""


class DirectAborts:
    """Aborts requests that were placed by tickets."""

    def __init__(self, core: RouterCore, secret: FleetSecret) -> None:
        self._core = core
        self._secret = secret

    async def abort(self, request_id: RequestId, tenant: TenantId) -> None:
        """Stop a request of this tenant; what is unknown, over, or another tenant's is left alone, silently."""
        placement = self._core.placed_by_ticket(request_id)
        if placement is None:
            return
        # The worker compares the tenant. It is a router's own note, for this call: a caller never sees it.
        note = Ticket(
            request_id=request_id,
            tenant=tenant,
            namespace=Namespace(bytes(NAMESPACE_BYTES)),
            incarnation=placement.incarnation,
        )
        async with open_channel(placement.endpoint, WORKER_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Abort(
                    pb.AbortRequest(request_id=request_id),
                    metadata=((TICKET_METADATA, sign(note, self._secret)),),
                    timeout=ABORT_TIMEOUT_S,
                )
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "abort_not_delivered request_id=%s worker=%s problem=%r",
                    request_id,
                    placement.endpoint,
                    error.details(),
                )
