"""``Explain``: what every worker would cost for a request, term by term. For administrators; it changes nothing."""

import time
from collections.abc import Callable

from prefixmesh.errors import AccessDeniedError, InvalidRequestError
from prefixmesh.ids import TenantId
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.cost import CandidateTerms
from prefixmesh.router.intake import Intake
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.rpc.identity import ApiKeys, Caller, check_tenant, identify
from prefixmesh.rpc.status import AnyContext


class ExplainService:
    """Answers from the core, as a decision would be made at this moment."""

    def __init__(
        self,
        *,
        core: RouterCore,
        intake: Intake,
        keys: ApiKeys | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._intake = intake
        self._keys = keys
        self._clock = clock

    async def Explain(  # noqa: N802  the service's own name
        self, message: pb.ExplainRequest, context: AnyContext
    ) -> pb.ExplainResponse:
        """Every candidate's terms for a request of the named tenant, and who could not take it."""
        caller = identify(context.invocation_metadata(), self._keys)
        if not caller.is_admin:
            raise AccessDeniedError("only an administrator's key may have decisions explained")
        tenant = _tenant(message.tenant, caller)
        request = self._intake.read(message.request)
        with self._intake.enter(tenant) as place:  # long prompts wait for threads: bounded, like any request
            prepared = await self._intake.prepare(request, message.request, tenant, place.request_id)
        told = self._core.explain(prepared.route, self._clock())
        entries = [entry for entry, _ in told.candidates]
        return pb.ExplainResponse(
            policy=self._core.policy,
            spill_weight=self._core.spill_weight,
            prompt_tokens=prepared.route.prompt_tokens,
            chosen=next((entry.name for entry in entries if entry.endpoint == told.chosen), ""),
            candidates=[self._candidate(entry, terms) for entry, terms in told.candidates],
            excluded=[
                pb.ExcludedWorker(worker_id=entry.name, address=entry.endpoint, why=why)
                for entry, why in told.excluded
            ],
        )

    def _candidate(self, entry: WorkerEntry, terms: CandidateTerms) -> pb.CandidateCost:
        followed = self._core.view.get(entry.endpoint)
        fields = terms._asdict()
        del fields["row"]
        return pb.CandidateCost(
            worker_id=entry.name,
            address=entry.endpoint,
            trust="" if followed is None else followed.trust.value,
            in_flight=entry.load.in_flight,
            **fields,
        )


def _tenant(named: str, caller: Caller) -> TenantId:
    if not named:
        return caller.tenant
    try:
        return check_tenant(named)
    except InvalidRequestError as error:
        raise InvalidRequestError("tenant", error.problem) from error
