"""The router's decisions as one pure core: where a request goes, and what each thing that happens to it teaches.

    route -> accepted -> first_token -> finished
                 \\___________\\________-> failed

The shell calls these as things happen and does the talking; simulations call them in simulated time. What workers hold is known from
their own events (``fleet_view``); a decision leaves a prediction beside it, so that a burst with one new prefix is not scattered. What
they have to do is known from their reports and this router's own reservations (``load``). A request whose caller streams from the worker
itself is moved by the worker's reports alone.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from prefixmesh.errors import AdapterChangedError
from prefixmesh.history import NO_HISTORY, History, Placed
from prefixmesh.ids import Fingerprint, Incarnation, RequestId
from prefixmesh.proto.cache_news import News
from prefixmesh.router.copy_sources import with_sources
from prefixmesh.router.cost import Demand, decode_work_ms, expected_answer_ms
from prefixmesh.router.decision import Decision, able_rows, decide, explain
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_columns import Mask
from prefixmesh.router.fleet_state import FleetState
from prefixmesh.router.fleet_view import FleetView
from prefixmesh.router.matched_tokens import MatchedTokens
from prefixmesh.router.no_candidate import no_candidate_error, why_not
from prefixmesh.router.overload import Outlook, Overload
from prefixmesh.router.placement import Explanation, Placement, PrefillCurve, RouteRequest
from prefixmesh.router.placements import Placements
from prefixmesh.router.policy import PolicyConfig, prefix_key
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.sessions import Sessions
from prefixmesh.router.slow_start import SlowStart
from prefixmesh.router.worker_identity import Expected, WorkerFacts
from prefixmesh.router.worker_view import Need
from prefixmesh.served_model import shown_name
from prefixmesh.worker_report import WorkerReport

GATHER_S: Final = 5.0
"""Who is heard of for the first time in so long a beginning of the router's is no newcomer: all workers are new to a new router."""

_DRAWING: Final = frozenset({"random", "power_of_two"})


class RouterCore:
    """The fleet's state and the requests that are under way. Not thread-safe: one loop owns it.

    ``now`` is seconds of one clock that never goes back.
    """

    def __init__(
        self,
        expected: Expected,
        policy: PolicyConfig,
        *,
        block_size: int,
        max_tree_blocks: int,
        draw: Callable[[], int],
        history: History = NO_HISTORY,
    ) -> None:
        """``draw`` gives random 64-bit numbers: for names of requests, and for policies that go by chance. ``history`` is told of every
        reservation's end."""
        self.fleet = FleetState(expected, max_tree_blocks)
        self._policy = policy
        self._block_size = block_size
        self._draw = draw
        self._is_cost = policy.policy == "cost"
        self._draws = policy.policy in _DRAWING
        self._history = history
        self._turn = 0
        self._newcomers = SlowStart(policy.slow_start_s if self._is_cost else 0.0)
        self._sessions = Sessions()
        self._overload = Overload(policy.max_wait_s)
        self._placements = Placements(self.fleet, history)
        self._began: float | None = None

    def __repr__(self) -> str:
        return f"RouterCore({len(self._placements)} placed, {self.fleet!r})"

    @property
    def registry(self) -> WorkerRegistry:
        """Who the workers are."""
        return self.fleet.registry

    @property
    def view(self) -> FleetView:
        """What they hold."""
        return self.fleet.view

    @property
    def policy(self) -> str:
        """Name of the policy in use."""
        return self._policy.policy

    @property
    def spill_weight(self) -> float:
        """How much the work that a choice adds for everyone else counts."""
        return self._policy.spill_weight

    @property
    def open_tickets(self) -> int:
        """Tickets that were given and whose time is not over."""
        return self._placements.open_tickets

    def placed_by_ticket(self, request_id: RequestId) -> Placement | None:
        """A request whose caller streams from the worker itself, for as long as it is not known to have ended; None for any other."""
        return self._placements.by_ticket(request_id)

    # What is heard of workers.

    def add_worker(self, endpoint: Endpoint, now: float) -> bool:
        """Know a worker; False when it was known already."""
        self._began = now if self._began is None else self._began
        return self.fleet.add(endpoint, now)

    def remove_worker(self, endpoint: Endpoint) -> bool:
        """Forget a worker and what it held; False when it was not known."""
        entry = self.registry.get(endpoint)
        if entry is not None:
            self._placements.abandon(entry)
            self._newcomers.left(entry.row)
        return self.fleet.remove(endpoint)

    def described(self, endpoint: Endpoint, facts: WorkerFacts, now: float) -> bool:
        """Take over what a worker told; True when it is a new life, of which nothing is believed yet."""
        entry = self.registry.get(endpoint)
        if entry is not None and entry.load.incarnation != facts.incarnation:
            self._placements.abandon(entry)
            if self._began is not None and now - self._began >= GATHER_S:
                self._newcomers.joined(entry.row, now)
        return self.fleet.described(endpoint, facts, now)

    def health_changed(self, endpoint: Endpoint, *, serving: bool) -> None:
        """A worker's health service said whether it is serving."""
        self.registry.health_changed(endpoint, serving=serving)
        self.fleet.tell_ready()

    def unreachable(self, endpoint: Endpoint, why: str) -> None:
        """A worker did not answer: nothing is sent to it until it answers again. What it holds stays believed: it may have lost
        the connection only, and a new life is noticed when it answers."""
        self.registry.unreachable(endpoint, why)
        self.fleet.tell_ready()

    def probe_ended(self, endpoint: Endpoint, problem: str, now: float) -> None:
        """A probe of a connected worker found ``problem``, or none when that is empty. Who comes back has been idle, and may have lost its
        caches: it is fed slowly. O(1) while the worker goes on as before; else see ``Readiness.review``."""
        if self.registry.probe_ended(endpoint, problem, now):
            entry = self.registry.get(endpoint)
            assert entry is not None, endpoint
            self._newcomers.joined(entry.row, now)
        self.fleet.tell_ready()

    def request_failed(self, endpoint: Endpoint, why: str, now: float) -> None:
        """A request ended by a worker's fault: it died with it, or says that it has a bug. Not for refusals, deadlines, cancels and what
        callers do wrong. O(1) while the worker goes on as before; else see ``Readiness.review``."""
        self.registry.request_failed(endpoint, why, now)
        self.fleet.tell_ready()

    def request_succeeded(self, endpoint: Endpoint) -> None:
        """A request ended well. O(1)."""
        self.registry.request_succeeded(endpoint)

    def stream_news(self, endpoint: Endpoint, incarnation: Incarnation, news: News, now: float) -> Need:
        """A message of a stream that was opened to this life of a worker. O(what it tells)."""
        entry = self.registry.get(endpoint)
        if entry is None or entry.load.incarnation != incarnation:
            return Need.SNAPSHOT  # of a worker that is no more: the stream is of no use
        need = self.view.take(endpoint, news, now)
        if isinstance(news, WorkerReport):
            self.on_report(endpoint, news, now)
        return need

    def on_report(self, endpoint: Endpoint, report: WorkerReport, now: float) -> None:
        """Take over a report on load: it moves reservations, and ends those that the worker has ended. O(ids + reservations there)."""
        entry = self.registry.get(endpoint)
        if entry is None:
            return
        self._placements.on_report(entry, report)
        self.fleet.on_report(entry, report, now)

    # What happens to requests.

    def route(
        self,
        request: RouteRequest,
        now: float,
        exclude: Collection[Endpoint] = (),
        *,
        request_id: RequestId | None = None,
        valid_s: float | None = None,
        time_left_s: float | None = None,
    ) -> Placement:
        """Decide where ``request`` goes and reserve its work there.

        ``request_id`` is drawn where none is given. ``valid_s`` is for a caller that is given a ticket: how long that admits.
        ``time_left_s`` is what the deadline of a new request leaves it, infinite without one; a request that was taken before, which goes
        on elsewhere, has None, and is not refused any more.

        Raises UnavailableError naming why when no worker is ready (or only those in ``exclude``), AdapterChangedError when some are, and
        none of them has the adapter's content any more, OverloadedError when it would wait too long; a request that is refused leaves
        nothing. O(prompt blocks + workers).
        """
        allowed, demand, newcomers = self._allowed(request, exclude), self._demand(request), self._newcomers
        if newcomers:
            allowed = newcomers.hold_back(able_rows(self.fleet.columns, allowed, demand), now)
        matches = self.fleet.matched(request.fingerprints, request.public)
        decision = self._decide(request, allowed, matches, demand)
        if decision is None:
            raise no_candidate_error(self.registry, request, exclude)
        if time_left_s is not None and decision.terms.wait_ms:
            outlook = self._outlook(request, decision)
            if not self._overload.takes(outlook, request.priority, time_left_s, now):
                decision = self._decide_among_idle(request, exclude, matches, demand)
                if decision is None:
                    raise self._overload.refuse(outlook, request.priority, time_left_s, now)
        self._turn += decision.was_tie
        if newcomers:
            newcomers.taken(decision.row)
        if self._policy.affinity_ms:
            self._sessions.went(request.session, self.fleet.at_row(decision.row).endpoint)
        self.view.index.touch(request.chain(decision.chain))
        expires_at = None if valid_s is None else now + valid_s
        return self._place(request, decision, request_id or self._new_id(), now, expires_at)

    def explain(self, request: RouteRequest, now: float, exclude: Collection[Endpoint] = ()) -> Explanation:
        """What every worker would cost for a request, and where it would go. Changes nothing. O(prompt blocks + workers).

        Raises as ``route`` does when an adapter's content is gone.
        """
        allowed, demand = self._allowed(request, exclude), self._demand(request)
        matches = self.fleet.matched(request.fingerprints, request.public)
        decision = self._decide(request, allowed, matches, demand)
        terms = explain(self.fleet.columns, allowed, matches, demand, self._policy)
        candidates = [(self.fleet.at_row(one.row), one) for one in terms]
        able = {entry.endpoint for entry, _ in candidates}
        excluded = [
            (entry, why_not(entry, request, exclude)) for entry in self.registry if entry.endpoint not in able
        ]
        return Explanation(
            None if decision is None else self.fleet.at_row(decision.row).endpoint, candidates, excluded
        )

    def accepted(self, placement: Placement, cached_tokens: int, now: float) -> None:
        """The worker admitted the request and found ``cached_tokens`` of its prompt. O(1); of a worker that tells nothing of its cache,
        and had less than believed, O(what is believed of it)."""
        request, entry = placement.request, placement.entry
        placement.is_admitted = True
        entry.totals.prompt_tokens += request.prompt_tokens
        entry.totals.cached_tokens += cached_tokens
        entry.errors.cached_tokens.add(placement.predicted_cached_tokens, cached_tokens)
        placement.reservation.accept(placement.curve.cost_ms(cached_tokens, request.prompt_tokens))
        self.fleet.load_changed(entry)
        if cached_tokens < placement.predicted_cached_tokens and self._placements.is_current(placement):
            lingering = self._placements.lingering(placement)
            lingering.take_back(placement.fingerprints, cached_tokens // self._block_size)

    def first_token(self, placement: Placement, now: float) -> None:
        """Prefill is over; O(1)."""
        waited_ms = 1000.0 * (now - placement.routed_at)
        placement.entry.errors.first_token_ms.add(placement.predicted_first_token_ms, waited_ms)
        placement.reservation.first_token()
        self.fleet.load_changed(placement.entry)

    def finished(self, placement: Placement, now: float, named: Iterable[Sequence[Fingerprint]] = ()) -> None:
        """The request ended well; each of ``named`` names the blocks of the prompt and one of its answers, which the worker holds now.
        Until it has told so itself, that is predicted. O(blocks)."""
        self._placements.end(placement, now, list(named) or [placement.fingerprints])

    def failed(self, placement: Placement, now: float) -> None:
        """The request ended in any other way: error, cancel, the worker's death. One that was never admitted has computed nothing, and
        leaves no prediction. Ended already: nothing happens. O(blocks)."""
        left = [placement.fingerprints] if placement.is_admitted else []
        self._placements.end(placement, now, left)

    def withdraw(self, request_id: str, now: float) -> bool:
        """A caller does not use its ticket: what was reserved with it is given back, unless the worker has taken the request in. False when
        nothing was. O(blocks)."""
        return self._placements.withdraw(request_id)

    def expire(self, now: float) -> None:
        """End the reservations of tickets that are over and that no worker has reported to be used. O(1) for each."""
        self._placements.expire(now)

    def tick(self, now: float) -> None:
        """What time alone brings about: silence, tickets that are over, workers that do not come back, predictions that have stayed long
        enough. Call it a few times a second. O(workers)."""
        self.fleet.review(now)
        self.expire(now)
        self._placements.abandon_lost(now)

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError."""
        self.fleet.check_invariants()

    # How it is done.

    def _allowed(self, request: RouteRequest, exclude: Collection[Endpoint]) -> Mask | None:
        allowed = None
        if request.adapter:
            allowed = self.fleet.rows_with_adapter(request.adapter, request.adapter_digest)
            if self.registry.ready and not allowed.any():
                raise AdapterChangedError(
                    f"the adapter {shown_name(request.adapter)} was loaded anew or unloaded a moment ago"
                )
        return self.fleet.without(allowed, exclude) if exclude else allowed

    def _demand(self, request: RouteRequest) -> Demand:
        return Demand(
            request.prompt_tokens,
            request.most_tokens,
            request.branches,
            self.fleet.rows_without_resident(request.adapter_digest) if request.adapter else None,
            home_row=self._home_row(request.session),
            prefix_key=prefix_key(request.fingerprints, request.whole_name),
            may_copy=self._is_cost,
        )

    def _home_row(self, session: int) -> int | None:
        """Where a session was before, for a router that draws sessions back."""
        if not self._policy.affinity_ms:
            return None
        last = self._sessions.last(session)
        entry = None if last is None else self.registry.get(last)
        return None if entry is None else entry.row

    def _decide(
        self, request: RouteRequest, allowed: Mask | None, matches: MatchedTokens, demand: Demand
    ) -> Decision | None:
        # The policies beside ``cost`` are there to be compared with: nothing is added to them.
        own_turn = request.whole_name if self._is_cost else 0
        chance = self._draw() if self._draws else 0
        turn, columns = own_turn or self._turn, self.fleet.columns
        decision = decide(columns, allowed, matches, demand, self._policy, turn, chance)
        if decision is not None and decision.terms.copied_tokens:
            if (copying := with_sources(self.fleet, request, decision)) is not None:
                return copying
            alone = demand._replace(may_copy=False)  # what it would copy is only expected yet: nobody has it
            decision = decide(columns, allowed, matches, alone, self._policy, turn, chance)
        if decision is None or matches.chains is None:
            return decision
        return decision._replace(chain=matches.chain(decision.row))

    def _place(
        self,
        request: RouteRequest,
        decision: Decision,
        request_id: RequestId,
        now: float,
        expires_at: float | None,
    ) -> Placement:
        columns, terms = self.fleet.columns, decision.terms
        row, rates = terms.row, columns.rates
        entry = self.fleet.at_row(row)
        placement = Placement(
            request_id=request_id,
            request=request,
            decision=decision,
            entry=entry,
            reservation=entry.load.reserve(
                request_id,
                prefill_ms=terms.prefill_ms + terms.load_back_ms,
                decode_ms=decode_work_ms(columns, row, request.max_tokens, request.branches),
                branches=request.branches,
            ),
            prediction=self.view.expect(entry.endpoint, request.chain(decision.chain)),
            curve=PrefillCurve(rates.linear.item(row), rates.quadratic.item(row)),
            routed_at=now,
            expires_at=expires_at,
            incarnation=entry.load.incarnation,
            spell=entry.spell,
        )
        entry.totals.routed += 1
        self.fleet.old_rates.routed(row)
        self._placements.add(placement)
        if expires_at is not None and self._history.is_on:
            self._history.note(Placed, placement.request_id, **placement.as_ticket())
        return placement

    def _outlook(self, request: RouteRequest, decision: Decision) -> Outlook:
        """When the request would be begun and ended. O(1)."""
        columns, terms = self.fleet.columns, decision.terms
        answer_ms = expected_answer_ms(columns, decision.row, request.max_tokens)
        worker = self.fleet.at_row(decision.row).name
        return Outlook(terms.wait_ms, terms.first_token_ms - terms.wait_ms + answer_ms, worker)

    def _decide_among_idle(
        self, request: RouteRequest, exclude: Collection[Endpoint], matches: MatchedTokens, demand: Demand
    ) -> Decision | None:
        """Before a request is refused: a worker where nobody waits, be it a newcomer that is held back, or one that seems so slow by a
        measurement that waiting elsewhere was expected to be quicker. Without it, such a one is never measured again. O(rows)."""
        columns = self.fleet.columns
        able = able_rows(columns, self._allowed(request, exclude), demand)
        idle = able & (columns.standing(self._policy.spill_weight).wait == 0.0)
        decision = self._decide(request, idle, matches, demand)
        return None if decision is None or decision.terms.wait_ms else decision

    def _new_id(self) -> RequestId:
        return RequestId(f"{self._draw():016x}{self._draw():016x}")
