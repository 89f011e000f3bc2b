"""What a worker believes about a caller, and the namespace that follows from it.

A ticket names tenant, namespace and request id, and nothing beside it counts. Without one, a worker that only its own machine
can reach lets metadata name the tenant; any other refuses.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prefixmesh.cache.namespace import Isolation, derive_namespace
from prefixmesh.cache.public import PublicPrefix
from prefixmesh.errors import AuthenticationError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.rpc.identity import identify
from prefixmesh.ticket import TICKET_METADATA, Ticket, verify
from prefixmesh.wall_clock import unix_ms
from prefixmesh.worker.ticket_gate import TicketGate

_REQUEST_ID_BYTES: Final = 12
"""Random bytes of a request id: nobody guesses one, none repeats."""

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCaller:
    """Who a call comes from, as far as this worker believes it."""

    tenant: TenantId
    request_id: RequestId
    """The server's id: the router's, or a fresh one."""

    ticket: Ticket | None
    """The router's note; None for a direct call."""

    @property
    def router_id(self) -> str:
        """The router whose reservation this is; empty where there is none."""
        return self.ticket.router_id if self.ticket is not None else ""

    @property
    def public(self) -> tuple[PublicPrefix, ...]:
        """Public prefixes that its prompt may live behind: only a router knows of any."""
        return self.ticket.public if self.ticket is not None else ()


class CallerCheck:
    """Identifies callers of one life of one worker, and lets each ticket in once."""

    def __init__(
        self,
        *,
        secret: FleetSecret,
        incarnation: Incarnation,
        model_revision: str,
        isolation: Isolation,
        tickets_only: bool,
        unix_ms: Callable[[], int] = unix_ms,
    ) -> None:
        """``unix_ms`` is the clock by which tickets expire."""
        self._secret = secret
        self._incarnation = incarnation
        self._model_revision = model_revision
        self._isolation = isolation
        self._tickets_only = tickets_only
        self._unix_ms = unix_ms
        self._gate = TicketGate()

    def identify(self, metadata: Metadata | None) -> WorkerCaller:
        """The caller of a call; raises AuthenticationError, or InvalidRequestError for a bad tenant name."""
        pairs = tuple(metadata or ())
        notes = [value for name, value in pairs if name == TICKET_METADATA]
        if not notes:
            return self._direct_caller(pairs)
        if len(notes) > 1:
            raise AuthenticationError("a call carries one ticket, not several")
        note = notes[0]
        ticket = verify(note if isinstance(note, bytes) else note.encode(), self._secret, self._incarnation)
        return WorkerCaller(tenant=ticket.tenant, request_id=ticket.request_id, ticket=ticket)

    def admit(self, caller: WorkerCaller) -> None:
        """Let the caller's one call in. Raises as ``TicketGate.admit``."""
        if caller.ticket is not None:
            self._gate.admit(caller.ticket, self._unix_ms())

    def _direct_caller(self, metadata: Metadata) -> WorkerCaller:
        if self._tickets_only:
            raise AuthenticationError("this worker serves only calls that carry a router's ticket")
        fresh_id = RequestId(secrets.token_hex(_REQUEST_ID_BYTES))
        return WorkerCaller(tenant=identify(metadata, None).tenant, request_id=fresh_id, ticket=None)

    def namespace(self, caller: WorkerCaller, extra_key: str, adapter_digest: str = "") -> Namespace:
        """Where the caller's KV lives: the ticket's namespace, or the one derived from tenant, adapter and ``extra_key``."""
        if caller.ticket is not None:
            return caller.ticket.namespace
        return derive_namespace(
            self._secret.namespace_key(),
            tenant=caller.tenant,
            adapter_digest=adapter_digest,
            model_revision=self._model_revision,
            caller_key=extra_key,
            isolation=self._isolation,
        )
