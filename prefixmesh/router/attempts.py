"""One request over all its attempts: who is tried next, when it is given up, and what it holds meanwhile. Pure.

::

    begin -> Send ---------------------------------> finished
              |  accepted, first_token                  |
              v                                         v
            failed -> Send (another worker)           close, whatever happens
                   -> Wait (for a retry's place) -> place_held -> Send
                   -> Prepare (the adapter changed) -> prepared -> Send
                   -> End

The shell tells what happens and does what it is answered; simulations do the same in simulated time. Each attempt has a decision, a name
and a reservation of its own, which is settled when the attempt is over, and the request one deadline, one end and one place in the budget.
What was told to the caller, and how another worker goes on with it, is ``answer_record``'s business.

Why an attempt failed decides what follows (``FailureKind``). A worker that has failed a request does not get it again in the same life.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from prefixmesh.errors import (
    AdapterChangedError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.history import (
    FINISHED,
    NO_HISTORY,
    Admitted,
    Asked,
    Ended,
    Failed,
    History,
    Placed,
    Resumed,
    Tokens,
)
from prefixmesh.ids import Fingerprint, Incarnation, RequestId
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.failure_kind import FailureKind
from prefixmesh.router.placement import Placement, RouteRequest
from prefixmesh.router.retry_budget import RetryBudget, RetryPlace
from prefixmesh.router.routing import RouterCore

MAX_ATTEMPTS: Final = 8
"""Of one request, whatever progress it makes: a long answer may outlive a few workers, and one that outlives more of them kills them."""

MAX_FRUITLESS: Final = 2
"""Deaths, and refusals, of attempts that follow each other without a token: one retry. A request that kills whoever takes it ends then,
and one that two workers have no room for is not worth a third's time."""

MAX_PREPARATIONS: Final = 3
"""How often a request is prepared whose adapter changes under it. An adapter that is loaded anew on all workers, one after the other, may
cost a request two of them."""


_RETRIED: Final = frozenset({FailureKind.DIED, FailureKind.REFUSED})


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to the placement's worker, under the placement's name."""

    placement: Placement
    goes_on: bool
    """Not the first attempt: it goes on from what was told, be that nothing, and repeats none of it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until ``on_place`` is called, and then ask ``place_held``; or ``close``."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prepare the request anew with the adapter that is there now, and tell ``prepared``."""


@dataclass(frozen=True, slots=True)
class End:
    """The caller's call ends in this error."""

    error: PrefixmeshError


Step: TypeAlias = Send | Wait | Prepare | End


class Attempts:
    """State of one request from its first decision to its end. ``close`` it whatever happens. ``now`` is the core's clock."""

    def __init__(
        self,
        core: RouterCore,
        budget: RetryBudget,
        request: RouteRequest,
        request_id: RequestId,
        *,
        deadline: float | None = None,
        on_place: Callable[[], object] = lambda: None,
        history: History = NO_HISTORY,
        resumed: Sequence[int] = (),
    ) -> None:
        """``deadline`` is by the core's clock, over all attempts; ``on_place`` is called when a ``Wait`` is over, and must not call back.
        ``resumed``: tokens that the caller brought along, by branch; with any, the request was taken once, somewhere."""
        self._core = core
        self._budget = budget
        self._request = request
        self._deadline = deadline
        self._on_place = on_place
        self._history = history
        self._resumed = tuple(resumed)
        self.request_id = request_id
        self._placement: Placement | None = None
        self._place: RetryPlace | None = None
        self._failed_by: dict[Endpoint, Incarnation] = {}
        self._failure: PrefixmeshError | None = None
        self._fruitless: Counter[FailureKind] = Counter()
        self._preparations = 1
        self._sent_tokens = 0
        self._told_tokens = 0
        self._is_open = False
        self.number = 0
        """Attempts so far."""

        self.has_token = False
        """Whether a token has come, in any attempt: the answer cannot begin anew."""

        self.was_accepted = False
        """Whether the attempt's worker has begun with it."""

        self._has_own_token = False
        self._has_begun = False
        self.outcome = CancelledError.reason
        """How the request has ended, for logs: ``finished``, an error's reason, CANCELLED where nobody has said."""

    def __repr__(self) -> str:
        return f"<Attempts {self.request_id}: {self.number} so far, {self.outcome}>"

    # What happens, in the order in which it does.

    def begin(self, now: float) -> Step:
        """The request has come. O(a decision)."""
        self._is_open = True
        self._budget.began()
        if self._history.is_on:
            self._note_asked(now)
        return self._send(now)

    def accepted(self, cached_tokens: int, now: float) -> None:
        """The worker has begun with it and found ``cached_tokens`` of its prompt cached."""
        self.was_accepted = self._has_begun = True
        self._core.accepted(self._running, cached_tokens, now)
        if self._history.is_on:
            self._history.note(Admitted, self.request_id, attempt=self.number, cached=cached_tokens)

    def first_token(self, now: float) -> None:
        """The attempt's first token has come, and goes to the caller."""
        self.has_token = self._has_own_token = self.was_accepted = self._has_begun = True
        self._fruitless.clear()
        self._leave_place()
        self._core.first_token(self._running, now)

    def resumed_at(self, positions: Sequence[int]) -> None:
        """Where, by branch, the attempt goes on. Only the history wants to know."""
        if self._history.is_on:
            self._history.note(Resumed, self.request_id, attempt=self.number, positions=tuple(positions))

    def told(self, branch: int, position: int, tokens: int) -> None:
        """So many tokens were passed on to the caller. Only the history wants to know."""
        self._told_tokens += tokens
        self._history.note(Tokens, self.request_id, branch=branch, position=position, count=tokens)

    def finished(self, now: float, named: Iterable[Sequence[Fingerprint]] = ()) -> None:
        """The answer is whole; ``named`` as of ``RouterCore.finished``."""
        self._core.finished(self._running, now, named)
        self.outcome = FINISHED
        self._placement = None

    def failed(
        self,
        kind: FailureKind,
        error: PrefixmeshError,
        now: float,
        *,
        sent_tokens: int = 0,
        was_put_out: bool = False,
    ) -> Step:
        """The attempt is over without the answer's end. ``sent_tokens`` is the longest answer that the caller has so far: whoever goes on
        computes those with the prompt. ``was_put_out``: the worker was given up for reasons of its own, so that nothing speaks against
        the request."""
        placement, had_own_token = self._running, self._has_own_token
        self._sent_tokens = sent_tokens
        if self._history.is_on:
            self._history.note(
                Failed, self.request_id, attempt=self.number, kind=kind.value, reason=str(error)
            )
        self._core.failed(placement, now)
        self._placement = None
        if kind is FailureKind.CHANGED:
            return self._prepare_anew(error)
        if kind not in _RETRIED:
            return self._end(self._as_going_on(error))
        self._failed_by[placement.endpoint] = placement.incarnation
        self._failure = _of_worker(kind, error, placement)
        if not (had_own_token or was_put_out):
            self._fruitless[kind] += 1
        if self._fruitless[kind] >= MAX_FRUITLESS or self.number >= MAX_ATTEMPTS:
            return self._end(self._failure)
        return self._try_again(kind, now)

    def place_held(self, now: float) -> Step:
        """What a ``Wait`` waited for is there."""
        assert self._place is not None, self
        assert self._place.is_held, self
        return self._send(now)

    def prepared(self, request: RouteRequest, now: float) -> Step:
        """The request as it is routed now."""
        self._request = request
        return self._send(now)

    def close(self, now: float, error: PrefixmeshError | None = None) -> None:
        """The request is over: it ended, or nobody wants it any more. Gives everything back; a second time nothing happens."""
        if self._placement is not None:
            self._core.failed(self._placement, now)
            self._placement = None
        self._leave_place()
        if not self._is_open:
            return
        self._is_open = False
        self._failure = None  # errors hold the frames that they passed, and what these hold
        self._budget.ended()
        if error is not None and self.outcome != FINISHED:
            self.outcome = error.reason
        if self._history.is_on:
            self._history.note(
                Ended, self.request_id, outcome=self.outcome, completion_tokens=self._told_tokens
            )

    # How it is decided.

    @property
    def _running(self) -> Placement:
        assert self._placement is not None, self
        return self._placement

    def _try_again(self, kind: FailureKind, now: float) -> Step:
        if self._place is None:
            self._place = self._budget.take_place()
        if kind is FailureKind.REFUSED:
            if self._place is None or not self._budget.may_retry_refused(now):
                return self._end(self._failure)
        elif self._place is None:
            self._place = self._budget.await_place(self._on_place)
            return Wait()
        return self._send(now)

    def _as_going_on(self, error: PrefixmeshError) -> PrefixmeshError:
        """A worker that does not take what it is to go on from has nothing against what the caller asked."""
        if self.has_token and isinstance(error, InvalidRequestError):
            return UnavailableError(f"the answer cannot be gone on with: {error}")
        return error

    def _with_failure(self, error: PrefixmeshError) -> PrefixmeshError:
        """Nobody is left to be tried: why the last worker failed says more, and why there is no other says what to do."""
        if isinstance(self._failure, UnavailableError):
            return UnavailableError(f"{self._failure}; nor can another take it: {error}")
        return self._failure or error

    def _prepare_anew(self, error: PrefixmeshError) -> Step:
        if self._has_begun:  # what the caller was told is of the content that was there
            return self._end(UnavailableError(f"the answer cannot go on: {error}"))
        if self._preparations >= MAX_PREPARATIONS:
            return self._end(error)
        self._preparations += 1
        return Prepare()

    def _send(self, now: float) -> Step:
        if self._deadline is not None and now >= self._deadline:
            return self._end(DeadlineError("the deadline passed before the request was sent to a worker"))
        name = RequestId(f"{self.request_id}.{self.number + 1}") if self.number else self.request_id
        time_left_s = None  # who was taken once is not refused for want of time, and what was told not lost
        if not self.number and not any(self._resumed):
            time_left_s = math.inf if self._deadline is None else self._deadline - now
        try:
            placement = self._core.route(
                self._to_route(), now, self._excluded(), request_id=name, time_left_s=time_left_s
            )
        except AdapterChangedError as error:
            return self._prepare_anew(error)
        except PrefixmeshError as error:
            return self._end(self._with_failure(error))
        self.number += 1
        self._placement = placement
        self.was_accepted = self._has_own_token = False
        if self._history.is_on:
            self._note_placed(placement)
        return Send(placement, self.number > 1)

    def _to_route(self) -> RouteRequest:
        request, sent = self._request, self._sent_tokens
        if not sent:
            return request
        left = None if request.max_tokens is None else max(0, request.max_tokens - sent)
        return replace(request, prompt_tokens=request.prompt_tokens + sent, max_tokens=left)

    def _excluded(self) -> Collection[Endpoint]:
        """Workers that have failed it and are in the same life still. O(those)."""
        if not self._failed_by:
            return ()
        entries = ((self._core.registry.get(endpoint), life) for endpoint, life in self._failed_by.items())
        return [entry.endpoint for entry, life in entries if entry and entry.load.incarnation == life]

    def _end(self, error: PrefixmeshError | None) -> End:
        assert error is not None
        self.outcome = error.reason
        self._leave_place()
        return End(error)

    def _leave_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.leave()

    def _note_asked(self, now: float) -> None:
        self._history.note(
            Asked,
            self.request_id,
            branches=self._request.branches,
            resumed=self._resumed,
            prompt_tokens=self._request.prompt_tokens,
            max_tokens=self._request.max_tokens,
            timeout_s=None if self._deadline is None else self._deadline - now,
        )

    def _note_placed(self, placement: Placement) -> None:
        self._history.note(
            Placed,
            self.request_id,
            attempt=self.number,
            worker=placement.endpoint,
            incarnation=placement.incarnation,
            reservation=placement.request_id,
        )


def _of_worker(kind: FailureKind, error: PrefixmeshError, placement: Placement) -> PrefixmeshError:
    """What a caller is told where nobody else is tried: the worker's own words for want of room, and else that a worker failed it. Its
    trouble with the router is not the caller's credentials."""
    if kind is FailureKind.REFUSED and isinstance(error, OverloadedError):
        return error
    return UnavailableError(f"worker {placement.entry.name} failed this request: {error}")
