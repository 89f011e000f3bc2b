"""The router's decisions as one pure core: where a request goes, and what each thing that happens to it teaches.

    route -> accepted -> first_token -> finished
                 \\___________\\________-> failed

The shell calls these as things happen and does the talking; simulations call them in simulated time. Beliefs are corrected from
what workers say: a decision is recorded at once as a belief (so that a burst with one new prefix is not scattered), a worker's
``cached_tokens`` confirms or corrects it, a new incarnation empties it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prefixmesh.errors import AdapterChangedError, UnavailableError
from prefixmesh.ids import Fingerprint, Incarnation
from prefixmesh.router.cost import (
    Candidate,
    Rates,
    RequestSize,
    decode_ms,
    expected_output,
    fill_rates,
    prefill_ms,
)
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.policy import Decision, PolicyConfig, choose
from prefixmesh.router.prefix_tree import PrefixTree
from prefixmesh.router.registry import Expected, WorkerEntry, WorkerFacts, WorkerRegistry
from prefixmesh.router.reservation import Reservation, ReservationState
from prefixmesh.served_model import shown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a decision needs to know of a request."""

    fingerprints: Sequence[Fingerprint]
    """Names of the prompt's whole blocks."""

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


@dataclass(slots=True, kw_only=True)
class Placement:
    """A request that was routed, until it ends. Made by ``RouterCore.route``; given back to it as things happen."""

    request: RouteRequest
    decision: Decision
    entry: WorkerEntry
    reservation: Reservation
    rates: Rates
    known_blocks: int
    """Leading blocks that the worker was believed to hold before this decision was recorded."""

    incarnation: Incarnation = field(init=False)
    """The life of the worker that the decision was about."""

    def __post_init__(self) -> None:
        self.incarnation = self.entry.load.incarnation

    @property
    def endpoint(self) -> Endpoint:
        """Where it goes."""
        return self.decision.endpoint


class RouterCore:
    """Registry, prefix tree and loads under one roof. Not thread-safe: one loop owns it."""

    def __init__(
        self, expected: Expected, policy: PolicyConfig, *, block_size: int, max_tree_blocks: int
    ) -> None:
        self.registry = WorkerRegistry(expected)
        self.tree = PrefixTree(max_tree_blocks)
        self._policy = policy
        self._block_size = block_size
        self._turn = 0
        self._placements: dict[Reservation, Placement] = {}

    def __repr__(self) -> str:
        return f"RouterCore({len(self._placements)} placed, {self.registry!r}, {self.tree!r})"

    @property
    def policy(self) -> str:
        """Name of the policy in use."""
        return self._policy.policy

    def add_worker(self, endpoint: Endpoint) -> bool:
        """Know a worker; False when it was known already."""
        return self.registry.add(endpoint)

    def remove_worker(self, endpoint: Endpoint) -> bool:
        """Forget a worker and what it held; False when it was not known. O(its blocks)."""
        self.tree.remove_worker(endpoint)
        return self.registry.remove(endpoint)

    def described(self, endpoint: Endpoint, facts: WorkerFacts) -> bool:
        """Take over what a worker told; True when it is a new life, of which nothing is believed yet."""
        is_new_life = self.registry.described(endpoint, facts)
        if is_new_life:
            self.tree.remove_worker(endpoint)
        return is_new_life

    def health_changed(self, endpoint: Endpoint, *, serving: bool) -> None:
        """A worker's health service said whether it is serving."""
        self.registry.health_changed(endpoint, serving=serving)

    def unreachable(self, endpoint: Endpoint, why: str) -> None:
        """A worker did not answer: nothing is sent to it until it answers again. What it holds stays believed: it may have lost
        the connection only, and a new life is noticed when it answers."""
        self.registry.unreachable(endpoint, why)

    def route(self, request: RouteRequest, exclude: Collection[Endpoint] = ()) -> Placement:
        """Decide where ``request`` goes and reserve its work there.

        Raises UnavailableError naming why when no worker is ready (or only those in ``exclude``), AdapterChangedError when some are, and
        none of them has the adapter's content any more.
        O(prompt blocks + workers).
        """
        able = [e for e in self.registry.ready if e.has_adapter(request.adapter, request.adapter_digest)]
        if self.registry.ready and not able:
            raise AdapterChangedError(
                f"the adapter {shown_name(request.adapter)} was loaded anew or unloaded a moment ago"
            )
        entries = [e for e in able if e.endpoint not in exclude and _has_room(e, request)]
        if not entries:
            raise self._no_candidate_error(able, exclude)
        size = RequestSize(request.prompt_tokens, expected_output(request.max_tokens))
        candidates = self._candidates(entries, request)
        # The policies beside ``cost`` are there to be compared with: nothing is added to them.
        own_turn = request.whole_name if self._policy.policy == "cost" else 0
        decision = choose(candidates, size, self._policy, own_turn or self._turn)
        assert decision is not None
        self._turn += decision.was_tie
        at = next(i for i, entry in enumerate(entries) if entry.endpoint == decision.endpoint)
        return self._place(request, decision, entries[at], candidates[at].rates, size)

    def accepted(self, placement: Placement, cached_tokens: int) -> None:
        """The worker admitted the request and found ``cached_tokens`` of its prompt.

        Where that is less than believed, the belief was wrong for everything that continues the prefix there, and is dropped;
        what this request (and others under way) now compute is believed anew. O(prompt blocks + blocks dropped).
        """
        request = placement.request
        totals = placement.entry.totals
        totals.prompt_tokens += request.prompt_tokens
        totals.cached_tokens += cached_tokens
        placement.reservation.accept(prefill_ms(request.prompt_tokens - cached_tokens, placement.rates))
        if not self._is_current(placement):
            return
        if cached_tokens < placement.decision.matched_tokens:
            self._drop_belief(placement, cached_tokens // self._block_size)
        self.tree.record(request.fingerprints, placement.endpoint)

    def first_token(self, placement: Placement) -> None:
        """Prefill is over; O(1)."""
        placement.reservation.first_token()

    def finished(self, placement: Placement, *named: Sequence[Fingerprint]) -> None:
        """The request ended well; each of ``named`` names the blocks of the prompt and one of its answers, which the worker holds now.
        O(blocks)."""
        is_current = self._is_current(placement)
        self._settle(placement)
        if is_current:
            for fingerprints in named:
                self.tree.record(fingerprints, placement.endpoint)

    def failed(self, placement: Placement) -> None:
        """The request ended in any other way: error, cancel, the worker's death.

        A request that was never admitted has computed nothing, and the belief that came with its decision is withdrawn.
        """
        was_admitted = placement.reservation.state is not ReservationState.RESERVED
        is_current = self._is_current(placement)
        self._settle(placement)
        if is_current and not was_admitted:
            self._drop_belief(placement, placement.known_blocks)

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError."""
        self.tree.check_invariants()
        for entry in self.registry:
            entry.load.check_invariants()

    def _candidates(self, entries: Sequence[WorkerEntry], request: RouteRequest) -> list[Candidate]:
        facts = [_facts_of(entry) for entry in entries]
        rates = fill_rates([its.rates for its in facts])
        matches = self.tree.find_matches(request.fingerprints)
        return [
            Candidate(
                entry.endpoint,
                its.expected_cached(matches.get(entry.endpoint, 0) * self._block_size, request.prompt_tokens),
                entry.load.in_flight,
                entry.load.prefill_ms,
                entry.load.work_ms,
                its_rates,
                its.max_running_requests,
            )
            for entry, its, its_rates in zip(entries, facts, rates, strict=True)
        ]

    def _place(
        self, request: RouteRequest, decision: Decision, entry: WorkerEntry, rates: Rates, size: RequestSize
    ) -> Placement:
        reservation = entry.load.reserve(
            prefill_ms=decision.cost.prefill_ms,
            decode_ms=request.branches * decode_ms(size.output_tokens, rates),
        )
        entry.totals.routed += 1
        placement = Placement(
            request=request,
            decision=decision,
            entry=entry,
            reservation=reservation,
            rates=rates,
            known_blocks=self.tree.record(request.fingerprints, entry.endpoint),
        )
        self._placements[reservation] = placement
        return placement

    def _settle(self, placement: Placement) -> None:
        placement.reservation.settle()
        del self._placements[placement.reservation]

    def _is_current(self, placement: Placement) -> bool:
        """Whether the worker's life that the decision was about is still the one that is known."""
        entry = self.registry.get(placement.endpoint)
        return entry is placement.entry and entry.load.incarnation == placement.incarnation

    def _drop_belief(self, placement: Placement, keep: int) -> None:
        """Forget this prompt's blocks beyond ``keep``; requests under way that share them will compute them, so theirs stay."""
        fingerprints = placement.request.fingerprints
        if not self.tree.forget(fingerprints, keep, placement.endpoint):
            return
        first = fingerprints[keep]
        for reservation in placement.entry.load.open_reservations():
            other = self._placements[reservation].request.fingerprints
            if len(other) > keep and other[keep] == first:
                self.tree.record(other, placement.endpoint)

    def _no_candidate_error(
        self, able: Sequence[WorkerEntry], exclude: Collection[Endpoint]
    ) -> UnavailableError:
        if any(entry.endpoint not in exclude for entry in able):
            return UnavailableError("no worker that is ready now has a context long enough for this request")
        return self.registry.no_worker_error()


def _has_room(entry: WorkerEntry, request: RouteRequest) -> bool:
    needed = request.prompt_tokens + (1 if request.max_tokens is None else request.max_tokens)
    return needed <= _facts_of(entry).context_length


def _facts_of(entry: WorkerEntry) -> WorkerFacts:
    assert entry.facts is not None, "a ready worker has told its facts"
    return entry.facts
