"""One request's course to its answer: what each attempt asks, what its messages are to the caller, and what follows when it fails. Pure.

::

    sent -> Started -> token -> token -> ... -> Finished
      |        |         |
      |        |         +-- broken: goes on elsewhere with the tokens so far (AnswerRecord)
      +--------+------------ broken: begins anew
      elsewhere: another worker (``direct.DirectPlan``), or the router once it is back (``ride.Ride``)

The clients make the calls, wait, and measure the time. What they read from ``course.received`` is one answer, whatever happened.
"""

from prefixmesh.answer_record import AnswerRecord, LivedTimes
from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.direct import DirectPlan, RouteMemory
from prefixmesh.client.ride import Broken, Failure, Ride
from prefixmesh.errors import (
    LIFE_IS_OVER,
    AdapterChangedError,
    InvalidRequestError,
    OverloadedError,
    StoppingError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2


class Course:
    """The attempts of one request, of either path. Feed it every message with ``received`` and every failure."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        builder: AnswerBuilder,
        ride: Ride,
        *,
        plan: DirectPlan | None = None,
        memory: RouteMemory | None = None,
        resumes: bool = True,
    ) -> None:
        """``plan`` and the client's ``memory`` of workers are those of a direct call; without them the router carries the answer. Without
        ``resumes`` an answer that has begun ends where it breaks off."""
        self._asked = request
        self._builder = builder
        self._ride = ride
        self._plan = plan
        self._memory = memory
        self._resumes = resumes
        self._goes_on = self._answers = False
        self._begin()
        self.request = request
        """What the next attempt asks of the router."""

        self.last: pb.GenerateResponse | None = None
        """The message that is still to be read once ``failed`` has said that no other attempt is needed."""

    @property
    def plan(self) -> DirectPlan | None:
        """Where a direct call goes next; None where the router carries the answer."""
        plan = self._plan
        return None if plan is None or plan.by_proxy else plan

    @property
    def owes_token(self) -> bool:
        """Whether a worker that is read directly has begun to answer, so that its silence is a failure. Each attempt's own first token may
        take as long as it does: a worker that goes on with an answer computes its prompt first. O(1); any thread may ask."""
        return self._answers and self.plan is not None

    def routed(self, answer: router_pb2.RouteResponse) -> pb.GenerateRequest:
        """The router named a worker; what to send it."""
        assert self._plan is not None
        self._answers = False
        self._ride.answered()
        return self._plan.routed(answer)

    def give_back(self) -> router_pb2.RouteRequest | None:
        """What to tell the router before the proxy is asked, or when the request has failed; its answer means nothing."""
        return None if self._plan is None else self._plan.give_back()

    def received(self, response: pb.GenerateResponse, now_s: float) -> pb.GenerateResponse | None:
        """A message of the attempt as the caller is to have it; None where there is nothing to tell. O(its size).

        Raises UnavailableError when a worker does not go on where the answer stood.
        """
        if self._plan is None or not self._plan.worker:
            self._ride.answered()
        if self._plan is not None:
            response = self._plan.complete(response)
        event = response.WhichOneof("event")
        self._answers |= event not in (None, "started")
        match event:
            case "started" if self._lived.started_s is None:
                self._lived.started_s = now_s
            case "delta":
                self._progressed(now_s)
            case _:
                pass
        if self._goes_on:
            return self._record.continued(response, now_s)
        self._record.told_message(response)
        return response

    def ended(self) -> Broken | None:
        """An attempt's stream ended well: what that means where the answer is not there. None: it is there, or a router has ended it so, which
        the builder will complain of."""
        if self._builder.answer is not None or self._plan is None or not self._plan.worker:
            return None
        return Broken(UnavailableError("it ended the stream before the answer"), Failure.DIED)

    def failed(self, broken: Broken, now_s: float, left_s: float | None) -> float | None:
        """An attempt's stream failed: seconds to wait before the next one, for which there are ``left_s``; None when none is needed, since the
        answer is there but for ``last``. Raises what ends the request."""
        if self._builder.answer is not None:
            return None
        if self._goes_on and isinstance(broken.error, OverloadedError) and self.plan is not None:
            # Busy is the caller's to hear before its answer has begun. One that has begun looks for another worker.
            self.plan.worker_busy(broken.error)
            self._go_on()
            return 0.0
        if self._goes_on and isinstance(broken.error, InvalidRequestError):
            # Whoever does not take what it is to go on from has nothing against what the caller asked.
            raise UnavailableError(f"the answer cannot be gone on with: {broken.error}") from broken.error
        if broken.failure is Failure.CALLERS and not isinstance(broken.error, AdapterChangedError):
            raise broken.error
        if self._record.has_token:
            if not self._resumes:
                raise broken.error  # what was answered stays answered
            if isinstance(broken.error, AdapterChangedError):
                raise UnavailableError(f"the answer cannot go on: {broken.error}") from broken.error
        if self._record.is_whole:
            self._record.interrupted()
            self.last = self._record.whole_end(now_s)
            return None
        pause_s = self._after(broken, now_s, left_s)
        self._go_on()
        return pause_s

    def route_failed(self, broken: Broken, now_s: float, left_s: float | None) -> float:
        """The router named no worker: seconds to wait before it is asked again, or the proxy is. Raises what ends the request."""
        assert self._plan is not None
        assert self._memory is not None
        if isinstance(broken.error, UnsupportedError):
            self._memory.no_route(now_s)
        elif broken.failure is not Failure.REFUSED or self._ride.is_waiting or _stops(broken):
            return self._ride.broke(broken, now_s, left_s)
        self._ride.answered()
        self._plan.route_failed(broken.error)
        return 0.0

    def _after(self, broken: Broken, now_s: float, left_s: float | None) -> float:
        plan = self._plan
        if plan is None or not plan.worker:
            return self._ride.broke(broken, now_s, left_s)
        error = broken.error
        assert self._memory is not None
        is_death = isinstance(error, LIFE_IS_OVER)
        if broken.failure is Failure.REFUSED and not is_death and self._lived.started_s is None:
            if not self._memory.refusals.may_retry(now_s):
                raise UnavailableError(f"worker {plan.worker} refused this request: {error}") from error
        elif broken.failure is Failure.UNREACHED:
            self._memory.unreached(plan.worker, now_s)
            error = UnavailableError(f"{plan.worker} cannot be reached from here: {error}")
        plan.worker_failed(error, reached=broken.failure is not Failure.UNREACHED)
        return 0.0

    def _begin(self) -> None:
        request = self._asked
        resumed = request.resumed_branches or ([request.resumed_output] if request.resumed_output else [])
        self._lived = LivedTimes(asked_s=self._builder.sent_at_s)
        self._record = AnswerRecord(max(1, request.branches), resumed, self._lived)

    def _go_on(self) -> None:
        """Make the next attempt's request."""
        if not self._record.has_token:
            self._builder.begin_again()
            self._begin()
            return
        self._record.interrupted()
        request = pb.GenerateRequest()
        request.CopyFrom(self._asked)
        self._record.resume(request)
        if self._plan is not None:
            self._plan.resume(request)
        self.request, self._goes_on = request, True

    def _progressed(self, now_s: float) -> None:
        if self._lived.first_token_s is None:
            self._lived.first_token_s = now_s
        self._ride.progressed()
        if self._plan is not None:
            self._plan.progressed()


def _stops(broken: Broken) -> bool:
    return isinstance(broken.error, StoppingError)


def begin_course(
    request: pb.GenerateRequest,
    builder: AnswerBuilder,
    ride: Ride,
    memory: RouteMemory | None,
    *,
    resumes: bool,
    now_s: float,
) -> Course:
    """The course of a request that is sent now: directly where there is a ``memory`` of workers, else through the router."""
    if memory is None:
        return Course(request, builder, ride, resumes=resumes)
    memory.refusals.asked()
    plan = DirectPlan(request, memory.avoided(now_s), knows_route=memory.knows_route(now_s))
    return Course(request, builder, ride, plan=plan, memory=memory, resumes=resumes)
