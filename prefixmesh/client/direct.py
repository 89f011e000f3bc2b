"""How a request reaches a worker itself: the attempts it may take, and when the router's proxy is the better way. Pure.

::

    ask Route -> stream from the worker -> tokens -> the end
        |                |                   |
        |                |                   +-- died, drains --> ask again without it, with the tokens so far (``course``)
        |                +-- cannot be reached from here --> ask again without it; after two, the proxy
        |                +-- died, drains, refuses the ticket --> ask again without it, once
        |                +-- its adapter has changed --> ask again, the workers being asked first
        +-- knows no Route (an older router, or a worker) --> the proxy, for a while without asking
        +-- no worker but those that cannot be reached from here --> the proxy

The proxy is the same service at the address that the client was given; it needs no ticket and reaches every worker.
"""

from collections.abc import Iterable
from typing import Final

from prefixmesh.errors import (
    AdapterChangedError,
    AuthenticationError,
    PrefixmeshError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.ticket import TICKET_METADATA

MAX_FAILURES: Final = 2
"""Workers that may fail one request, after they were reached, without a token in between, as many as at the proxy: a request that kills
workers must not go round."""

MAX_ATTEMPTS: Final = 8
"""Workers that may have one request in all, however far each of them came."""

MAX_UNREACHED: Final = 2
"""Workers that are tried in vain before the proxy is: where two cannot be reached, the caller most likely sits outside their network."""

MAX_CHANGES: Final = 3
"""Attempts at which the adapter may be another than at the decision, as many as at the proxy."""

AVOID_S: Final = 10.0
"""A worker that could not be reached is not asked for so long: each attempt may cost a caller the whole time that connecting may take."""

FORGET_ROUTE_S: Final = 60.0
"""A router that knew no Route may have been replaced by one that does."""

RETRY_SHARE: Final = 0.15
"""Tries after a refusal, of all requests: a fleet that refuses is full, and must not be asked twice as often for it. With what may be saved up
it is sent at most 1.2 attempts a request in 20 s of refusing 100 a second, as by the proxy (``router.retry_budget``)."""

LEAST_RETRIES: Final = 3
"""A client that asks little may still try again: as often in ``RETRY_WINDOW_S``, and at first."""

RETRY_WINDOW_S: Final = 10.0
MOST_RETRIES: Final = 50
"""What a busy client may have saved up before a fleet begins to refuse."""

GIVE_BACK_TIMEOUT_S: Final = 5.0
"""To tell of a ticket that was not used; it ends by itself within twice that."""

MAX_AVOIDED: Final = 64
"""Workers that are remembered as out of reach; they travel with every question."""


class RouteMemory:
    """What a client has learnt from its requests, for the next ones. The caller's clock; not thread-safe."""

    def __init__(self) -> None:
        self._avoided: dict[str, float] = {}
        self.refusals: Final = RefusalBudget()
        self._no_route_until = float("-inf")

    def __repr__(self) -> str:
        return f"RouteMemory(avoids {sorted(self._avoided)})"

    def knows_route(self, now: float) -> bool:
        """Whether the router may be asked: it has not said lately that it knows no Route."""
        return now >= self._no_route_until

    def no_route(self, now: float) -> None:
        """The router said that it knows no Route."""
        self._no_route_until = now + FORGET_ROUTE_S

    def unreached(self, address: str, now: float) -> None:
        """A worker could not be reached from here."""
        self._avoided.pop(address, None)  # the newest stands last
        while len(self._avoided) >= MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]
        self._avoided[address] = now + AVOID_S

    def avoided(self, now: float) -> list[str]:
        """Workers that are not to be asked for now. O(those remembered)."""
        self._avoided = {address: until for address, until in self._avoided.items() if until > now}
        return list(self._avoided)


class RefusalBudget:
    """How often a client tries again after refusals: every request pays in a share of one try, every try takes one out (Finagle's retry
    budget). The caller's clock; not thread-safe; O(1)."""

    def __init__(self) -> None:
        self._saved = float(LEAST_RETRIES)
        self._counted_s: float | None = None

    def asked(self) -> None:
        """A request came."""
        self._saved = min(MOST_RETRIES, self._saved + RETRY_SHARE)

    def may_retry(self, now: float) -> bool:
        """Whether one more try is within the budget; if so, it is taken out."""
        if self._saved < LEAST_RETRIES and self._counted_s is not None:
            earned = (now - self._counted_s) * LEAST_RETRIES / RETRY_WINDOW_S
            self._saved = min(LEAST_RETRIES, self._saved + earned)
        self._counted_s = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


class DirectPlan:
    """The attempts of one request: ``next_question`` says what to do, the other methods tell what came of it."""

    def __init__(
        self, request: pb.GenerateRequest, avoid: Iterable[str] = (), *, knows_route: bool = True
    ) -> None:
        """``avoid`` are workers that could not be reached lately; without ``knows_route`` it goes to the proxy at once."""
        self._request = request
        self._exclude = list(avoid)
        self._failures = self._unreached = self._changes = self._attempts = 0
        self._has_failed = False
        self._is_taken = False
        """Whether the worker that was named last has said anything, or the router was told that it will not."""

        self._last_failure: PrefixmeshError | None = None
        self._answer: router_pb2.RouteResponse | None = None
        self._prompt_ids = b""
        self._retokenized_tokens = 0
        self.by_proxy = not knows_route
        """Whether the request goes to the proxy."""

    @property
    def worker(self) -> str:
        """Address of the worker that was named last; empty before, and where the proxy answers."""
        return "" if self._answer is None or self.by_proxy else self._answer.address

    def next_question(self) -> router_pb2.RouteRequest:
        """What to ask the router."""
        return router_pb2.RouteRequest(
            request=self._request,
            exclude=self._exclude,
            adapter_changed=isinstance(self._last_failure, AdapterChangedError),
            unused_request_id=self._answer.request_id if self._answer else "",
        )

    def routed(self, answer: router_pb2.RouteResponse) -> pb.GenerateRequest:
        """Take the router's answer; what to send to the worker: the prompt as tokens, and nothing that the ticket settles."""
        self._answer, self._is_taken = answer, False
        self._attempts += 1
        if not self._prompt_ids:
            self._prompt_ids, self._retokenized_tokens = answer.prompt_ids, answer.retokenized_tokens
        sent = pb.GenerateRequest()
        sent.CopyFrom(self._request)
        if answer.prompt_ids:
            sent.tokens.ids = answer.prompt_ids
        sent.model = sent.extra_key = sent.session = ""
        return sent

    def ticket(self) -> tuple[tuple[str, bytes], ...]:
        """The call's metadata."""
        assert self._answer is not None, "routed() first"
        return ((TICKET_METADATA, self._answer.ticket),)

    def resume(self, request: pb.GenerateRequest) -> None:
        """Go on with ``request``, which has the tokens so far. Its prompt is asked as the tokens that it was, where they are known: a router
        that has been started anew might tokenise a chat's history otherwise."""
        if self._prompt_ids:
            request.tokens.ids = self._prompt_ids
        self._request = request

    def progressed(self) -> None:
        """A token has come: what failed before it is no reason any more not to try another worker."""
        self._failures = 0

    def use_proxy(self) -> None:
        """Send this request to the proxy."""
        self.by_proxy = True

    def give_back(self) -> router_pb2.RouteRequest | None:
        """What the router is still to be told when it is not asked again: of the last decision, which came to nothing. None where the
        worker has begun, and once."""
        answer = self._answer
        if answer is None or self._is_taken:
            return None
        self._is_taken = True
        return router_pb2.RouteRequest(unused_request_id=answer.request_id)

    def route_failed(self, error: PrefixmeshError) -> None:
        """The router answered no worker: returns where the proxy is the way, raises what the caller is told elsewhere."""
        if isinstance(error, UnsupportedError):
            self.use_proxy()
            return
        if not isinstance(error, UnavailableError) or not self._exclude:
            raise error
        if self._last_failure is not None and self._has_failed:
            raise self._last_failure from error  # there is no other worker to try
        self.use_proxy()  # which reaches those that were excluded here

    def worker_failed(self, error: PrefixmeshError, *, reached: bool) -> None:
        """The worker ended the attempt before the answer's end: returns where there is another attempt, raises where there is none."""
        self._last_failure = error
        if isinstance(error, AdapterChangedError):
            self._changes += 1
            if self._changes >= MAX_CHANGES:
                raise error
            return
        if not isinstance(error, UnavailableError | AuthenticationError):
            raise error
        if isinstance(error, AuthenticationError):
            # The caller is told this where nobody else is left to try, and its own credentials are good.
            self._last_failure = UnavailableError(f"worker {self.worker} did not take the ticket: {error}")
        self._exclude.append(self.worker)
        if reached:
            self._failures += 1
            self._has_failed = True
            if self._failures >= MAX_FAILURES or self._attempts >= MAX_ATTEMPTS:
                # The caller's credentials are the router's business: that a worker refuses a ticket is trouble of the fleet's own.
                raise UnavailableError(f"worker {self.worker} failed this request: {error}") from error
        else:
            self._unreached += 1
            if self._unreached >= MAX_UNREACHED:
                self.use_proxy()

    def worker_busy(self, error: PrefixmeshError) -> None:
        """The worker is full, and the answer has begun elsewhere: another is looked for, which costs the request nothing but an attempt."""
        self._last_failure, self._has_failed = error, True
        self._exclude.append(self.worker)
        if self._attempts >= MAX_ATTEMPTS:
            raise error

    def complete(self, response: pb.GenerateResponse) -> pb.GenerateResponse:
        """A worker's response with what only the router knows added; the same message."""
        answer = self._answer
        if answer is None or self.by_proxy:
            return response
        self._is_taken = True
        match response.WhichOneof("event"):
            case "started":
                response.started.routing.CopyFrom(answer.routing)
                response.started.model = answer.model or response.started.model
            case "finished":
                response.finished.usage.retokenized_tokens = self._retokenized_tokens
            case _:
                pass
        return response
