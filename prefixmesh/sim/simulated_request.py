"""One request at a simulated router, from its question to its end, over the cores that the real relay drives: ``router.attempts`` says what
is tried and when it is given up, ``answer_record`` how another worker goes on.

Here is what ``router.relay`` does around them, in simulated time: it sends, notes what comes, learns from what fails, and ends at the
deadline or when its caller leaves. Answers travel as events, and become the wire's messages where their caller wants each token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from prefixmesh.answer_record import AnswerRecord
from prefixmesh.errors import (
    CancelledError,
    DeadlineError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.history import History
from prefixmesh.ids import RequestId, TenantId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.attempts import Attempts, End, Prepare, Send, Step, Wait
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.failure_kind import FailureKind, kind_of
from prefixmesh.router.heat.watch import HeatWatch
from prefixmesh.router.placement import Placement
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.retry_budget import RetryBudget
from prefixmesh.router.routing import RouterCore
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_answers import as_response
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_life import SIMULATED_SECRET, Call, CallFailed, WorkerMessage
from prefixmesh.sim.simulated_link import SimulatedLink
from prefixmesh.sim.simulated_question import Question, as_route_request, as_submit
from prefixmesh.ticket import Ticket, sign
from prefixmesh.tokens import count
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut

ANSWER_BUFFER = 1 << 20
"""Messages of one answer that wait for a slow reader, as many as it may have tokens."""

TENANT = TenantId("simulated")


@dataclass(slots=True, kw_only=True)
class Answered:
    """What has become of a question; times are seconds of simulated time. Its prompt is not kept: a trace has gigabytes of them."""

    prompt_tokens: int
    asked_at: float
    worker: str = ""
    cached_tokens: int = 0
    """On all tiers."""

    host_tokens: int = 0
    """Of those, what came from the host."""

    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    error: str = ""
    """Empty where it ended well; else the error's reason."""


class Carrying(Protocol):
    """The life of a router that a request is of."""

    sim: Simulation
    network: Network
    name: str
    router_id: str
    core: RouterCore
    budget: RetryBudget
    history: History
    public: PublicPrefixes
    heat: HeatWatch | None
    links: dict[Endpoint, SimulatedLink]
    stream_idle_s: float
    requests: dict["SimulatedRequest", None]


OnEnd = Callable[[Answered, PrefixmeshError | None], object]
Tell = Callable[[pb.GenerateResponse], object]


class SimulatedRequest:
    """See the module. ``begin`` it once; ``stop`` ends it early."""

    def __init__(
        self,
        router: Carrying,
        question: Question,
        request_id: RequestId,
        on_end: OnEnd,
        *,
        tell: Tell | None = None,
        deadline: float | None = None,
    ) -> None:
        """``tell`` is given every message of the answer; without it only the first token and the end are asked for, and an answer that has
        begun cannot go on elsewhere."""
        self._router = router
        self._sim = router.sim
        self._question = question
        self._on_end = on_end
        self._tell = tell
        self._deadline = deadline
        self.answered = Answered(prompt_tokens=count(question.prompt), asked_at=self._sim.now)
        self._record = AnswerRecord(1, [question.resumed])
        self._route_request = as_route_request(question, router.public)
        self._attempts = Attempts(
            router.core,
            router.budget,
            self._route_request,
            request_id,
            deadline=deadline,
            on_place=self._on_place,
            history=router.history,
            resumed=(count(question.resumed),) if question.resumed else (),
        )
        self._placement: Placement | None = None
        self._goes_on = self._has_own_token = False
        self._stream: Stream[WorkerMessage] | None = None
        self._idle: Timer | None = None
        self._due: Timer | None = None
        self.is_over = False

    def begin(self) -> None:
        """Route it, and send it."""
        self._router.requests[self] = None
        if self._deadline is not None:
            late = DeadlineError("the deadline passed before the answer was whole")
            self._due = self._sim.call_at(self._deadline, self.stop, late)
        self._do(self._attempts.begin(self._sim.now))

    def stop(self, error: PrefixmeshError | None = None) -> None:
        """Its caller has left, or its time is over. Over already: nothing happens."""
        if not self.is_over:
            self._end(error or CancelledError("the caller has left"))

    def vanish(self) -> None:
        """The router has died: its connections break, and nobody is told anything."""
        self.is_over = True
        self._leave_worker()
        if self._due is not None:
            self._due.cancel()

    def given_up(self, why: str) -> None:
        """The link expects nothing more of the worker."""
        self._failed(FailureKind.DIED, UnavailableError(why), was_put_out=True)

    # What is to be done.

    def _do(self, step: Step) -> None:
        match step:
            case Send(placement=placement, goes_on=goes_on):
                self._send(placement, goes_on=goes_on)
            case Wait():
                pass
            case Prepare():
                raise AssertionError("simulated requests have no adapters")
            case End(error=error):
                self._end(error)

    def _on_place(self) -> None:
        self._sim.call_later(0.0, self._place_held)

    def _place_held(self) -> None:
        if not self.is_over:
            self._do(self._attempts.place_held(self._sim.now))

    def _send(self, placement: Placement, *, goes_on: bool) -> None:
        self._placement, self._goes_on, self._has_own_token = placement, goes_on, False
        self.answered.worker = placement.endpoint
        if self._router.heat is not None and not goes_on:
            self._router.heat.routed(placement, self._question.namespace, self._question.prompt)
        try:
            resumed = self._resumed()
        except UnavailableError as error:
            self._end(error)
            return
        left_s = math.inf if self._deadline is None else self._deadline - self._sim.now
        submit = as_submit(replace(self._question, resumed=resumed), placement.request_id, left_s)
        router, ticket = self._router, self._ticket(placement)
        link = router.links[placement.endpoint]
        link.calls[self] = None

        def begin(answer: "Stream[WorkerMessage]") -> None:
            link.worker.generate(
                Call(
                    submit=submit,
                    router_id=router.router_id,
                    answer=answer,
                    every_token=self._tell is not None,
                    ticket=ticket,
                )
            )

        self._stream = open_call(
            router.network,
            router.name,
            link.worker.name,
            begin,
            self._on_message,
            lambda: self._on_broken(placement),
            buffer=ANSWER_BUFFER,
        )

    def _resumed(self) -> bytes:
        """What the attempt goes on from. Raises UnavailableError where nobody can go on from what was told."""
        if not self._goes_on:
            return self._question.resumed
        if self._attempts.has_token and self._tell is None:
            raise UnavailableError("the answer cannot be gone on with: nobody has kept it")
        request = pb.GenerateRequest(resumed_output=self._question.resumed)
        self._record.resume(request)
        if self._router.history.is_on and self._record.has_token:
            self._attempts.resumed_at([branch.length for branch in self._record.branches])
        return request.resumed_output

    def _ticket(self, placement: Placement) -> bytes:
        ticket = Ticket(
            request_id=placement.request_id,
            tenant=TENANT,
            namespace=self._question.namespace,
            incarnation=placement.incarnation,
            router_id=self._router.router_id,
            public=self._route_request.candidates,
        )
        return sign(ticket, SIMULATED_SECRET)

    # What comes from the worker.

    def _on_message(self, message: WorkerMessage) -> None:
        if isinstance(message, CallFailed):
            self._worker_said(message.error)
            return
        try:
            response = as_response(message)
        except PrefixmeshError as error:
            self._worker_said(error)
            return
        match message:
            case Admitted():
                self._on_admitted(message)
            case TokensOut():
                self._on_tokens()
            case Ended():
                self._on_finished(message.completion_tokens)
            case Refused():
                raise AssertionError("a refusal is an error")
        self._pass_on(response)
        if isinstance(message, Ended) and not self.is_over:
            self._end(None)

    def _on_admitted(self, admitted: Admitted) -> None:
        if self._attempts.number == 1:
            self.answered.cached_tokens = admitted.cached_tokens
            self.answered.host_tokens = admitted.host_tokens
        self._attempts.accepted(admitted.cached_tokens, self._sim.now)

    def _on_tokens(self) -> None:
        if not self._has_own_token:
            self._has_own_token = True
            self._attempts.first_token(self._sim.now)
        if self.answered.first_token_at is None:
            self.answered.first_token_at = self._sim.now
        self._wait_for_more()

    def _on_finished(self, completion_tokens: int) -> None:
        assert self._placement is not None
        self._attempts.finished(self._sim.now)
        self._router.links[self._placement.endpoint].note_success()
        self.answered.tokens = completion_tokens

    def _pass_on(self, response: pb.GenerateResponse) -> None:
        """Tell the caller what it has not been told. Ends the request where an attempt does not go on where the last one stopped."""
        if self._tell is None:
            return
        told: pb.GenerateResponse | None = response
        if self._goes_on:
            try:
                told = self._record.continued(response, self._sim.now)
            except UnavailableError as error:
                self._end(error)
                return
        else:
            self._record.told_message(response)
        if told is None:
            return
        delta = told.delta
        if self._router.history.is_on and delta.token_ids:
            self._attempts.told(delta.branch, delta.position, count(delta.token_ids))
        self._tell(told)

    def _wait_for_more(self) -> None:
        """Count the silence from now on; not where only the first token and the end are asked for."""
        if self._idle is not None:
            self._idle.cancel()
        if self._tell is not None and not self.is_over and self._router.stream_idle_s:
            self._idle = self._sim.call_later(self._router.stream_idle_s, self._on_silence)

    def _on_silence(self) -> None:
        placement = self._placement
        if self.is_over or placement is None:
            return
        worker = self._router.links[placement.endpoint].worker
        # It may not have noticed that nobody waits any more; the question may be lost, or come twice.
        self._router.network.send(self._router.name, worker.name, lambda: worker.abort(placement.request_id))
        problem = f"it has said nothing for {self._router.stream_idle_s:g} s"
        self._failed(FailureKind.DIED, UnavailableError(problem))

    def _on_broken(self, placement: Placement) -> None:
        if placement is self._placement:
            self._failed(FailureKind.DIED, UnavailableError("the connection broke"), is_broken=True)

    def _worker_said(self, error: PrefixmeshError) -> None:
        kind = kind_of(error, is_told=True, was_accepted=self._attempts.was_accepted)
        self._failed(kind, error, is_broken=isinstance(error, UnavailableError))

    def _failed(
        self,
        kind: FailureKind,
        error: PrefixmeshError,
        *,
        is_broken: bool = False,
        was_put_out: bool = False,
    ) -> None:
        """The attempt is over without the answer's end."""
        placement, now = self._placement, self._sim.now
        if self.is_over or placement is None:
            return
        self._leave_worker()
        if placement.tells_of_now:
            link = self._router.links[placement.endpoint]
            link.note_failure(kind, str(error))
            if is_broken:
                link.suspect(str(error))
        sent = max(branch.new_tokens for branch in self._record.branches)
        step = self._attempts.failed(kind, error, now, sent_tokens=sent, was_put_out=was_put_out)
        if not isinstance(step, End):
            self._record.interrupted()
        self._do(step)

    def _leave_worker(self) -> None:
        """Want no more of the attempt that is under way."""
        stream, self._stream, placement, self._placement = self._stream, None, self._placement, None
        if self._idle is not None:
            self._idle.cancel()
        if placement is not None:
            self._router.links[placement.endpoint].calls.pop(self, None)
        if stream is not None:
            stream.leave()

    def _end(self, error: PrefixmeshError | None) -> None:
        self.is_over = True
        self._leave_worker()
        if self._due is not None:
            self._due.cancel()
        self._router.requests.pop(self, None)
        self._attempts.close(self._sim.now, error)
        self.answered.error = "" if error is None else error.reason
        self.answered.ended_at = self._sim.now
        self._on_end(self.answered, error)
