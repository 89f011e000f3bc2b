"""``Route``: where a request goes, and the ticket with which its caller streams from that worker itself.

Nothing of such a request passes here any more. Its reservation is moved by the worker's reports; it ends as they say, with the worker's
life, or with a ticket that nobody has used in time. The prompt goes back as tokens, so that it is tokenised once, and with the very
tokens that were named.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import Final

from prefixmesh import wall_clock
from prefixmesh.addresses import is_address
from prefixmesh.errors import AdapterChangedError, InvalidRequestError, OverloadedError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import TenantId
from prefixmesh.proto.v1 import inference_pb2, router_pb2
from prefixmesh.requests import GenerateRequest, TokenPrompt
from prefixmesh.router.attempts import MAX_PREPARATIONS
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.intake import Intake
from prefixmesh.router.open_tickets import OpenTickets
from prefixmesh.router.placement import OnRouted, Placement
from prefixmesh.router.prepare import PreparedRequest
from prefixmesh.router.routing import RouterCore
from prefixmesh.rpc.identity import ApiKeys, identify
from prefixmesh.rpc.status import AnyContext
from prefixmesh.ticket import Ticket, sign

TICKET_VALID_S: Final = 10.0
"""A caller uses its ticket at once, unless it must connect first (``rpc.channel.CONNECT_TIMEOUT_MS``). The rest is for clocks: how far
a worker's is ahead was measured with what its answer took as the error. So long, at most, the load of an unused ticket stays booked."""

MAX_OPEN_TICKETS: Final = 65_536
"""Tickets whose time is not over; each keeps a reservation of a few kilobytes. Five thousand a second is more than one router decides."""

MAX_EXCLUDED: Final = 256
"""Workers that a caller may exclude: a client remembers fewer."""

_MS: Final = 1000


class RouteService:
    """Serves ``Router.Route``, to the callers that ``Generate`` serves."""

    def __init__(
        self,
        *,
        core: RouterCore,
        intake: Intake,
        secret: FleetSecret,
        keys: ApiKeys | None,
        router_id: str,
        model: str,
        on_routed: OnRouted | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_ms: Callable[[], int] = wall_clock.unix_ms,
    ) -> None:
        """``clock`` is the core's; by ``unix_ms``, milliseconds since 1970, tickets end."""
        self._core = core
        self._intake = intake
        self._secret = secret
        self._keys = keys
        self._router_id = router_id
        self._model = model
        self._on_routed = on_routed
        self._clock = clock
        self._unix_ms = unix_ms
        self._tickets = OpenTickets()

    async def Route(  # noqa: N802  the service's own name
        self, message: router_pb2.RouteRequest, context: AnyContext
    ) -> router_pb2.RouteResponse:
        """Decide, reserve, and sign a ticket."""
        caller = identify(context.invocation_metadata(), self._keys)
        exclude = _excluded(message.exclude)
        if message.unused_request_id:
            if self._tickets.is_of(message.unused_request_id, caller.tenant):
                self._core.withdraw(message.unused_request_id, self._clock())
            if message.request.WhichOneof("prompt") is None:
                return router_pb2.RouteResponse()  # its caller goes another way
        if self._core.open_tickets >= MAX_OPEN_TICKETS:
            raise OverloadedError(
                f"{MAX_OPEN_TICKETS} tickets of this router have not ended, which is its limit"
            )
        self._tickets.check(caller.tenant, self._clock())
        request = self._intake.read(message.request)
        with self._intake.enter(caller.tenant) as place:
            if message.adapter_changed and request.adapter:
                await self._intake.ask_adapters()
            for tries_left in reversed(range(MAX_PREPARATIONS)):
                prepared = await self._intake.prepare(
                    request, message.request, caller.tenant, place.request_id
                )
                try:
                    placement = self._core.route(
                        prepared.route,
                        self._clock(),
                        exclude,
                        request_id=place.request_id,
                        valid_s=TICKET_VALID_S,
                        time_left_s=_time_left_s(message, request, context),
                    )
                except AdapterChangedError:
                    if not tries_left:
                        raise
                    await self._intake.ask_adapters()
                else:
                    ends_at = self._clock() + TICKET_VALID_S
                    self._tickets.given(placement.request_id, caller.tenant, ends_at)
                    if self._on_routed is not None and not message.unused_request_id:
                        self._on_routed(placement, prepared.namespace, prepared.prompt.tokens)
                    return self._answer(request, prepared, placement, caller.tenant)
        raise AssertionError("the last preparation returns or raises")

    def _answer(
        self, request: GenerateRequest, prepared: PreparedRequest, placement: Placement, tenant: TenantId
    ) -> router_pb2.RouteResponse:
        prompt = prepared.prompt
        return router_pb2.RouteResponse(
            worker_id=placement.entry.name,
            address=placement.endpoint,
            ticket=sign(self._ticket(request, prepared, placement, tenant), self._secret),
            prompt_ids=b"" if isinstance(request.prompt, TokenPrompt) else prompt.tokens,
            routing=inference_pb2.Routing(
                policy=self._core.policy,
                predicted_cached_tokens=placement.predicted_cached_tokens,
                predicted_first_token_ms=placement.predicted_first_token_ms,
            ),
            request_id=placement.request_id,
            valid_ms=round(TICKET_VALID_S * _MS),
            model=self._model,
            retokenized_tokens=prompt.retokenized_tokens,
        )

    def _ticket(
        self, request: GenerateRequest, prepared: PreparedRequest, placement: Placement, tenant: TenantId
    ) -> Ticket:
        most = request.sampling.max_tokens
        return Ticket(
            request_id=placement.request_id,
            tenant=tenant,
            namespace=prepared.namespace,
            incarnation=placement.incarnation,
            adapter_digest=prepared.route.adapter_digest,
            router_id=self._router_id,
            expires_unix_ms=self._unix_ms() + placement.entry.clock_ahead_ms + round(TICKET_VALID_S * _MS),
            prompt_tokens=prepared.route.prompt_tokens,
            max_tokens=0 if most is None else max(1, most),  # 0 would set no limit
            branches=request.branches,
            sources=placement.sources,
            public=prepared.route.candidates,
        )


def _time_left_s(
    message: router_pb2.RouteRequest, request: GenerateRequest, context: AnyContext
) -> float | None:
    """What the deadline leaves of the caller's time, infinite without one. The call's deadline is the request's own: whoever asks has the
    same answer in mind. None for a request that was taken before and goes on after a failure."""
    if message.unused_request_id or request.resumed_output or request.resumed_branches:
        return None
    left_s = context.time_remaining()
    return math.inf if left_s is None else left_s


def _excluded(addresses: Collection[str]) -> Collection[Endpoint]:
    if not addresses:
        return ()
    if len(addresses) > MAX_EXCLUDED:
        raise InvalidRequestError(
            "exclude", f"at most {MAX_EXCLUDED} workers may be excluded, got {len(addresses)}"
        )
    for number, address in enumerate(addresses):
        if not is_address(address):
            raise InvalidRequestError(f"exclude[{number}]", f"must be host:port, got {address[:80]!r}")
    return {Endpoint(address) for address in addresses}
