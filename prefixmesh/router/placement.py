"""A request on its way through the router: what a decision needs to know of it, where it was sent, and what was expected of that. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from prefixmesh.cache.public import PublicPrefix
from prefixmesh.ids import Fingerprint, Incarnation, Namespace, RequestId
from prefixmesh.kv_source import KvSource
from prefixmesh.router.cost import CandidateTerms
from prefixmesh.router.decision import Decision
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.predictions import Prediction
from prefixmesh.router.reservation import Reservation
from prefixmesh.router.sessions import NO_SESSION
from prefixmesh.router.worker_entry import WorkerEntry


class PublicChain(NamedTuple):
    """What the blocks of a prompt are named where it lives behind a public prefix."""

    prefix: PublicPrefix
    fingerprints: Sequence[Fingerprint]
    """As many as in the caller's own namespace."""


PLAIN: Final = 0
"""The number of a prompt's own chain, in the caller's namespace alone."""


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a decision needs to know of a request."""

    fingerprints: Sequence[Fingerprint]
    """Names of the prompt's whole blocks, in the caller's own namespace."""

    public: tuple[PublicChain, ...] = ()
    """Their names behind each public prefix that the prompt begins with, the longest first: a worker takes the one of which it has most, of
    equal ones the first, the caller's own last (``cache.public.choose_key``)."""

    prompt_tokens: int
    max_tokens: int | None
    """The caller's output limit."""

    branches: int = 1
    """Answers that are computed from the one prompt, all on one worker."""

    whole_name: int = 0
    """A number for the whole of a prompt that is shorter than a block, and so has no fingerprint; 0 for all others. Where workers are
    equal it picks one, so that the same short prompt comes back to the worker that has computed it."""

    adapter: str = ""
    """Name of the LoRA adapter; empty for the base model."""

    adapter_digest: str = ""
    """The content that the fingerprints were made with: only workers that have it under that name may compute."""

    priority: int = 0
    """Higher is refused later, where there is not room for all (``overload``)."""

    session: int = NO_SESSION
    """A number for the caller's session (``sessions.session_name``)."""

    @property
    def candidates(self) -> tuple[PublicPrefix, ...]:
        """What a ticket says of ``public``. O(1) without."""
        return tuple(chain.prefix for chain in self.public) if self.public else ()

    def chain(self, number: int) -> Sequence[Fingerprint]:
        """Names of the blocks by the ``number`` of a chain: ``PLAIN``, or from 1 on that of one of ``public``. O(1)."""
        return self.public[number - 1].fingerprints if number else self.fingerprints

    @property
    def most_tokens(self) -> int:
        """Prompt and answer at the caller's limit; of a caller without one, what must fit at least."""
        return self.prompt_tokens + (1 if self.max_tokens is None else self.max_tokens)


class PrefillCurve(NamedTuple):
    """How long a worker takes to compute tokens of a prompt."""

    linear_ms: float
    quadratic_ms: float

    def cost_ms(self, start: int, end: int) -> float:
        """Milliseconds for the tokens from ``start`` to ``end``."""
        return (self.linear_ms + self.quadratic_ms * (start + end)) * max(0, end - start)


class Placement(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """A request that was routed, until it ends. Made by ``RouterCore.route``; given back to it as things happen."""

    request_id: RequestId
    """Its name in the ticket and in the worker's reports; unique in this router's life."""

    request: RouteRequest
    decision: Decision
    entry: WorkerEntry
    reservation: Reservation
    prediction: Prediction
    curve: PrefillCurve
    routed_at: float
    expires_at: float | None
    """When a ticket that nobody has used is worth nothing any more; None where this router carries the request itself."""

    incarnation: Incarnation
    """The life of the worker that the decision was about."""

    spell: int
    """The worker's (``WorkerEntry.spell``) at the decision."""

    is_admitted: bool = False
    """Whether the worker has begun with it."""

    @property
    def endpoint(self) -> Endpoint:
        """Where it goes."""
        return self.entry.endpoint

    @property
    def tells_of_now(self) -> bool:
        """Whether what befalls the request says how the worker is now: it has been reachable and not failing ever since the decision."""
        return self.spell == self.entry.spell

    @property
    def fingerprints(self) -> Sequence[Fingerprint]:
        """Names of the prompt's whole blocks as the worker is expected to keep them."""
        return self.request.chain(self.decision.chain)

    @property
    def predicted_cached_tokens(self) -> int:
        """Leading prompt tokens that the worker is expected to find cached."""
        return self.decision.terms.cached_tokens

    @property
    def sources(self) -> tuple[KvSource, ...]:
        """Whom the worker is to copy from before it computes; none where it is not to."""
        return self.decision.sources

    def as_ticket(self) -> dict[str, Any]:
        """What a history notes of it where its caller goes to the worker by a ticket: all that is known of it here."""
        return {
            "attempt": 1,
            "worker": self.endpoint,
            "incarnation": self.incarnation,
            "reservation": self.request_id,
            "by_ticket": True,
        }

    @property
    def predicted_first_token_ms(self) -> float:
        """Expected time from the decision to the first token."""
        return self.decision.terms.first_token_ms


OnRouted: TypeAlias = Callable[[Placement, Namespace, bytes], object]
"""Told of each new request that was placed: where its KV lives, and its packed tokens."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a decision would weigh for a request now."""

    chosen: Endpoint | None
    """Where it would go; None when nobody could take it."""

    candidates: Sequence[tuple[WorkerEntry, CandidateTerms]]
    excluded: Sequence[tuple[WorkerEntry, str]]
    """Workers that could not take it, and why."""
