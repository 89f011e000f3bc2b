"""The part of the ``Router`` service that is for operators: which workers there are, and what is to be done with them.

For administrators; on loopback without API keys, for everybody.
"""

from typing import Any, Final, TypeVar

from prefixmesh.addresses import is_address
from prefixmesh.errors import AccessDeniedError, InvalidRequestError, NotFoundError, PrefixmeshError
from prefixmesh.fleet_control import ControlCall, call_workers
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.cache_counts import encode_cache_counts
from prefixmesh.proto.cache_news import encode_pool
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.hand_over import HandOvers
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_roster import WorkerRoster
from prefixmesh.rpc.draining import Drainer
from prefixmesh.rpc.identity import ApiKeys, identify
from prefixmesh.rpc.status import AnyContext

MAX_GRACE_MS: Final = 24 * 3_600_000
"""A day: longer than any answer; a larger number is a mistake in units."""

CALL_TIMEOUT_S: Final = 10.0
"""What a worker may take beside the grace that it is given."""

FIRST_ANSWER_S: Final = 2.0
"""How long whoever adds a worker waits to be told whether it can be used. One that is there answers within some milliseconds."""

_S_PER_MS: Final = 1e-3
_T = TypeVar("_T")


class OperatorService:
    """Answers from the core's state, keeps the roster, and passes on what a worker is to do."""

    def __init__(
        self,
        core: RouterCore,
        roster: WorkerRoster,
        secret: FleetSecret,
        keys: ApiKeys | None,
        drainer: Drainer,
        hand_overs: HandOvers,
    ) -> None:
        self._core = core
        self._roster = roster
        self._secret = secret
        self._keys = keys
        self._drainer = drainer
        self._hand_overs = hand_overs

    async def ListWorkers(  # noqa: N802  the service's own name
        self, message: pb.ListWorkersRequest, context: AnyContext
    ) -> pb.ListWorkersResponse:
        """All workers this router was given, as it sees them now."""
        self._admit(context, "list the workers")
        return pb.ListWorkersResponse(workers=[self._view(entry) for entry in self._core.registry])

    async def AddWorker(  # noqa: N802  the service's own name
        self, message: pb.AddWorkerRequest, context: AnyContext
    ) -> pb.AddWorkerResponse:
        """Follow a worker from now on, and after a restart where the state is kept; it need not be there yet."""
        self._admit(context, "add workers")
        added = await self._roster.add(_address(message.address))
        problem = await self._roster.first_problem(message.address, FIRST_ANSWER_S)
        return pb.AddWorkerResponse(added=added, problem=problem)

    async def RemoveWorker(  # noqa: N802  the service's own name
        self, message: pb.RemoveWorkerRequest, context: AnyContext
    ) -> pb.RemoveWorkerResponse:
        """Send a worker nothing more and forget it; its running streams end undisturbed."""
        self._admit(context, "remove workers")
        entry = self._find(message.address)
        address = _address(message.address) if entry is None else entry.endpoint
        return pb.RemoveWorkerResponse(removed=await self._roster.remove(address))

    async def DrainWorker(  # noqa: N802  the service's own name
        self, message: pb.DrainWorkerRequest, context: AnyContext
    ) -> control.DrainResponse:
        """Have a worker take nothing new; answers when what runs there has ended, or after the grace. With time for that, it hands over what
        it holds before it drains."""
        self._admit(context, "drain workers")
        _check_grace(message.grace_ms)
        _check_grace(message.hand_over_ms, "hand_over_ms")
        entry = self._find(message.address)
        if entry is not None and message.undo:
            self._hand_overs.take_back(entry)
        elif entry is not None and message.hand_over_ms and not entry.draining:
            await self._hand_overs.run(entry, message.hand_over_ms * _S_PER_MS)
        elif entry is not None:
            self._hand_overs.leave(entry)
        request = control.DrainRequest(grace_ms=message.grace_ms, undo=message.undo)

        async def drain(stub: Any, settings: Any) -> control.DrainResponse:
            answer: control.DrainResponse = await stub.Drain(request, **settings)
            return answer

        try:
            return await self._call(message.address, drain, CALL_TIMEOUT_S + message.grace_ms * _S_PER_MS)
        except PrefixmeshError:
            if entry is not None:
                self._hand_overs.take_back(entry)  # it was not told, or has not understood
            raise

    async def Drain(  # noqa: N802  the service's own name
        self, message: control.DrainRequest, context: AnyContext
    ) -> control.DrainResponse:
        """Have this router take nothing new; answers when what runs here has ended, or after the grace. Direct streams are the workers'."""
        self._admit(context, "drain this router")
        _check_grace(message.grace_ms)
        if message.undo:
            return control.DrainResponse(running_requests=await self._drainer.undo())
        running = await self._drainer.drain(message.grace_ms * _S_PER_MS)
        return control.DrainResponse(running_requests=running)

    async def FlushWorker(  # noqa: N802  the service's own name
        self, message: pb.FlushWorkerRequest, context: AnyContext
    ) -> control.FlushResponse:
        """Have a worker empty its prefix cache; its running requests go on."""
        self._admit(context, "flush caches")

        async def flush(stub: Any, settings: Any) -> control.FlushResponse:
            answer: control.FlushResponse = await stub.Flush(control.FlushRequest(), **settings)
            return answer

        return await self._call(message.address, flush, CALL_TIMEOUT_S)

    def _admit(self, context: AnyContext, what: str) -> None:
        if not identify(context.invocation_metadata(), self._keys).is_admin:
            raise AccessDeniedError(f"only an administrator's key may {what}")

    async def _call(self, address: str, call: ControlCall[_T], timeout_s: float) -> _T:
        """Make a control call at a worker of this router; raises what it ends in."""
        entry = self._find(address)
        if entry is None:
            raise NotFoundError(f"{_address(address)} is no worker of this router")
        (outcome,) = await call_workers({entry.name: entry.endpoint}, self._secret, call, timeout_s)
        if outcome.answer is None:
            assert outcome.error is not None, outcome
            raise outcome.error
        return outcome.answer

    def _find(self, name: str) -> WorkerEntry | None:
        """A worker by its address, or by its id; of several that claim one id, the one that has it. None when there is none. O(workers)."""
        entry = self._core.registry.get(Endpoint(name))
        if entry is not None or is_address(name):
            return entry
        named = [one for one in self._core.registry if one.facts and one.facts.worker_id == name]
        return min(named, key=lambda one: not one.ready, default=None)

    def _view(self, entry: WorkerEntry) -> pb.WorkerView:
        totals, facts = entry.totals, entry.facts
        cache = facts.cache if facts else None
        followed, report, errors = self._core.view.get(entry.endpoint), entry.report, entry.errors
        host_pool = report.host_pool if report else facts.host_pool if facts else None
        return pb.WorkerView(
            worker_id=facts.worker_id if facts else "",
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
            trust_changes={} if followed is None else followed.changes,
            running_requests=0 if report is None else report.running_requests,
            queued_requests=0 if report is None else report.queued_requests,
            uncached_tokens=0 if report is None else report.uncached_tokens,
            cached_tokens_bias=errors.cached_tokens.bias,
            cached_tokens_error=errors.cached_tokens.size,
            first_token_ms_bias=errors.first_token_ms.bias,
            first_token_ms_error=errors.first_token_ms.size,
            draining=entry.draining,
            ejected=entry.ejected,
            failures=entry.health.failures,
            host_pool=None if host_pool is None else encode_pool(host_pool),
            tiers=control.TierCounts(**facts.tiers) if facts and facts.tiers else None,
            host_blocks=0 if followed is None else followed.host_blocks,
            page_size=facts.page_size if facts else 0,
            load_back_ms_per_token=0.0 if report is None else report.load_back_ms_per_token,
            copies=control.CopyCounts(**facts.copies) if facts and facts.copies else None,
            copy_ms_per_token=0.0 if report is None else report.copy_ms_per_token,
        )


def _check_grace(grace_ms: int, field: str = "grace_ms") -> None:
    if not 0 <= grace_ms <= MAX_GRACE_MS:
        raise InvalidRequestError(field, f"must be 0 to {MAX_GRACE_MS}, got {grace_ms}")


def _address(text: str) -> str:
    if not is_address(text):
        raise InvalidRequestError(
            "address", f"must be host:port, or the id of a worker that is known, got {text[:80]!r}"
        )
    return text
