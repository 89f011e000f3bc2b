"""From a caller's message to a request that can be routed, the same for both data paths: known to be for this model, its adapter found,
its prompt built and named, in one of a bounded number of places."""

import logging
import secrets
from typing import Final

from prefixmesh.cache.namespace import short_digest
from prefixmesh.ids import RequestId, TenantId
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import GenerateRequest
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.model import RouterModel
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.running import RunningPlace, RunningRequests
from prefixmesh.served_model import check_model

_log = logging.getLogger(__name__)

REQUEST_ID_BYTES: Final = 12
"""Random bytes of a request id: nobody guesses one, none repeats."""

IDS_DRAWN: Final = 256
"""Ids drawn at a time: the system is asked for randomness once for so many requests."""


class Intake:
    """Takes requests in for one router."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        model: RouterModel,
        adapters: AdapterFinder,
        preparer: RequestPreparer,
        running: RunningRequests,
    ) -> None:
        self._registry = registry
        self._model = model
        self._adapters = adapters
        self._preparer = preparer
        self._running = running
        self._ids: list[str] = []

    def enter(self, tenant: TenantId) -> RunningPlace:
        """A place for a request of ``tenant``, under a new name; entering it raises UnavailableError or OverloadedError where there is
        none."""
        if not self._ids:
            self._ids = _draw_ids()
        return self._running.enter(RequestId(self._ids.pop()), tenant)

    def read(self, message: pb.GenerateRequest) -> GenerateRequest:
        """What is asked for; raises InvalidRequestError naming the field, NotFoundError for another model."""
        request = codec.decode_generate(message)
        check_model(self._model.name, request.model)
        return request

    async def prepare(
        self, request: GenerateRequest, message: pb.GenerateRequest, tenant: TenantId, request_id: str = ""
    ) -> PreparedRequest:
        """Build and name what ``read`` has read. Costs what tokenising costs, on other threads where that is much.

        Raises UnavailableError when no worker is ready, InvalidRequestError naming the field.
        """
        if not self._registry.ready:
            raise self._registry.no_worker_error()
        digest = await self._adapters.find(request.adapter) if request.adapter else ""
        prepared = await self._preparer.prepare(
            request,
            message,
            tenant,
            adapter_digest=digest,
            context_length=self._registry.context_length,
        )
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "request_prepared request_id=%s namespace=%s prompt_tokens=%d",
                request_id,
                short_digest(prepared.namespace),
                prepared.route.prompt_tokens,
            )
        return prepared

    async def ask_adapters(self) -> None:
        """Have the workers tell once more which adapters they have."""
        await self._adapters.ask()


def _draw_ids() -> list[str]:
    drawn, digits = secrets.token_hex(IDS_DRAWN * REQUEST_ID_BYTES), 2 * REQUEST_ID_BYTES
    return [drawn[start : start + digits] for start in range(0, len(drawn), digits)]
