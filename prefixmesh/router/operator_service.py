"""The ``Router`` service: what operators ask of a router."""

from prefixmesh.errors import AccessDeniedError
from prefixmesh.proto.cache_counts import encode_cache_counts
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.registry import WorkerEntry
from prefixmesh.router.routing import RouterCore
from prefixmesh.rpc.identity import ApiKeys, identify
from prefixmesh.rpc.status import AnyContext


class OperatorService:
    """Answers from the core's state. For administrators; on loopback without API keys, for everybody."""

    def __init__(self, core: RouterCore, keys: ApiKeys | None) -> None:
        self._core = core
        self._keys = keys

    async def ListWorkers(  # noqa: N802  the service's own name
        self, message: pb.ListWorkersRequest, context: AnyContext
    ) -> pb.ListWorkersResponse:
        """All workers this router was given, as it sees them now."""
        if not identify(context.invocation_metadata(), self._keys).is_admin:
            raise AccessDeniedError("only an administrator's key may list the workers")
        return pb.ListWorkersResponse(workers=[self._view(entry) for entry in self._core.registry])

    def _view(self, entry: WorkerEntry) -> pb.WorkerView:
        totals = entry.totals
        cache = entry.facts.cache if entry.facts else None
        followed, report, errors = self._core.view.get(entry.endpoint), entry.report, entry.errors
        return pb.WorkerView(
            worker_id=entry.facts.worker_id if entry.facts else "",
            address=entry.endpoint,
            ready=entry.ready,
            problem=entry.problem,
            in_flight=entry.load.in_flight,
            work_ms=entry.load.work_ms,
            blocks=0 if followed is None else followed.blocks,
            routed=totals.routed,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            cache=None if cache is None else encode_cache_counts(cache),
            adapters=sorted(entry.adapters),
            trust="" if followed is None else followed.trust.value,
            resyncs={} if followed is None else followed.view.causes,
            running_requests=0 if report is None else report.running_requests,
            queued_requests=0 if report is None else report.queued_requests,
            uncached_tokens=0 if report is None else report.uncached_tokens,
            cached_tokens_bias=errors.cached_tokens.bias,
            cached_tokens_error=errors.cached_tokens.size,
            first_token_ms_bias=errors.first_token_ms.bias,
            first_token_ms_error=errors.first_token_ms.size,
            draining=entry.draining,
        )
