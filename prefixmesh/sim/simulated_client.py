"""A caller in simulated time: the client library's own course of a request (``client.course``), over a simulated network.

It asks its router to carry the request, or where to send it and streams from the worker itself; it goes on elsewhere when that dies, and
waits for a router that is being started anew. What it is told it also counts by itself, so that nothing is taken for right because the
library took it.
"""

from collections.abc import Callable
from typing import Final

from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.course import begin_course
from prefixmesh.client.direct import RouteMemory
from prefixmesh.client.ride import Broken, Failure, Ride, RouterMemory
from prefixmesh.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InternalError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_answers import as_response
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_life import Call, CallFailed, WorkerMessage
from prefixmesh.sim.simulated_question import Question, as_submit
from prefixmesh.sim.simulated_router import AnswerEnd, SimulatedRouter
from prefixmesh.tokens import unpack

BUFFER: Final = 1 << 16
"""Messages of one answer that wait for its caller: more than the longest has."""


class SimulatedClient:
    """One request of one caller. ``begin`` it once."""

    def __init__(
        self,
        sim: Simulation,
        network: Network,
        name: str,
        router: SimulatedRouter,
        question: Question,
        timeout_s: float,
        on_end: Callable[["SimulatedClient"], object],
        *,
        memory: RouteMemory | None = None,
    ) -> None:
        """``memory`` is of a client that streams from workers itself; without one the router carries everything."""
        self.name = name
        self.question = question
        self.tokens: list[int] = []
        """The answer so far."""

        self.problem = ""
        """What was told that must not be; empty while all is well."""

        self.error: PrefixmeshError | None = None
        """What it ended in; None where it has its answer, or has not ended."""

        self.has_left = False
        """Whether it wanted no more; then, and only then, it may end in CANCELLED."""

        self.ended_at: float | None = None
        self.deadline = sim.now + timeout_s
        self._sim = sim
        self._network = network
        self._router = router
        self._on_end = on_end
        self._number = 0
        self._stream: Stream[router_pb2.RouteResponse | AnswerEnd] | None = None
        self._answer: Stream[pb.GenerateResponse | AnswerEnd] | None = None
        self._direct: Stream[WorkerMessage] | None = None
        self._builder = AnswerBuilder(sim.now)
        router_memory = RouterMemory()
        router_memory.has_answered = True  # in requests before this one
        sampling = pb.Sampling(max_tokens=question.max_tokens)
        self._course = begin_course(
            pb.GenerateRequest(tokens=pb.TokenPrompt(ids=question.prompt), sampling=sampling),
            self._builder,
            Ride(router_memory, rides=True, draw=sim.fork_rng(name).random),
            memory,
            resumes=True,
            now_s=sim.now,
        )

    def begin(self) -> None:
        """Ask."""
        late = DeadlineError("the deadline passed before the answer was whole")
        self._sim.call_at(self.deadline, self._end, late)
        self._open()

    def cancel(self) -> None:
        """Want it no more. Ended already: nothing happens."""
        self.has_left = self.has_left or self.ended_at is None
        self._end(CancelledError("the caller wants no more"))

    def _open(self) -> None:
        """Make the next call that the course wants."""
        if self.ended_at is not None:
            return
        self._leave()
        self._number += 1
        plan = self._course.plan
        if plan is not None:
            self._stream = self._ask_route(plan.next_question(), self._on_routed)
            return
        given_back = self._course.give_back()
        if given_back is not None:
            self._ask_route(given_back, lambda _: None)
        question = self._as_question(self._course.request)
        self._answer = open_call(
            self._network,
            self.name,
            self._router.name,
            lambda answer: self._router.serve(question, self.deadline - self._sim.now, answer),
            self._of_now(self._on_message),
            self._of_now(lambda: self._failed(Broken(UnavailableError("broke"), Failure.DIED))),
            buffer=BUFFER,
        )

    def _ask_route(
        self,
        question: router_pb2.RouteRequest,
        on_answer: Callable[[router_pb2.RouteResponse | AnswerEnd], object],
    ) -> "Stream[router_pb2.RouteResponse | AnswerEnd]":
        namespace = self.question.namespace
        return open_call(
            self._network,
            self.name,
            self._router.name,
            lambda answer: self._router.route(question, namespace, answer),
            self._of_now(on_answer),
            self._of_now(lambda: self._not_routed(Broken(UnavailableError("broke"), Failure.DIED))),
        )

    def _on_routed(self, answer: router_pb2.RouteResponse | AnswerEnd) -> None:
        if isinstance(answer, AnswerEnd):
            assert answer.error is not None
            self._not_routed(_broken(answer.error))
            return
        self._leave()
        self._number += 1
        sent, plan = self._course.routed(answer), self._course.plan
        assert plan is not None
        ((_, ticket),) = plan.ticket()
        submit = as_submit(self._as_question(sent), answer.request_id, self._left_s)
        worker = self._router.workers[Endpoint(answer.address)]
        self._direct = open_call(
            self._network,
            self.name,
            worker.name,
            lambda stream: worker.generate(Call(submit=submit, router_id="", answer=stream, ticket=ticket)),
            self._of_now(self._on_event),
            self._of_now(lambda: self._failed(Broken(UnavailableError("broke"), Failure.DIED))),
            buffer=BUFFER,
        )

    def _not_routed(self, broken: Broken) -> None:
        if self._course.plan is not None:
            self._pause(lambda: self._course.route_failed(broken, self._sim.now, self._left_s))

    def _on_event(self, message: WorkerMessage) -> None:
        if isinstance(message, CallFailed):
            self._failed(_broken(message.error))
            return
        try:
            response = as_response(message)
        except PrefixmeshError as error:
            self._failed(_broken(error))
        else:
            self._on_message(response)

    def _on_message(self, message: pb.GenerateResponse | AnswerEnd) -> None:
        if isinstance(message, AnswerEnd):
            if message.error is None:
                self._told_wrong("the router ended the answer, and it was not whole")
            else:
                self._failed(_broken(message.error))
            return
        try:
            ours = self._course.received(message, self._sim.now)
            if ours is not None:
                self._take(ours)
        except InternalError as error:
            self._told_wrong(str(error))
        except PrefixmeshError as error:
            self._end(error)

    def _take(self, response: pb.GenerateResponse) -> None:
        """A message as its caller is told it."""
        delta = response.delta
        if delta.token_ids:
            if delta.position != len(self.tokens):
                self.problem = f"told token {delta.position}, {len(self.tokens)} was next"
            self.tokens += unpack(delta.token_ids).tolist()
        self._builder.add(response, self._sim.now)
        if self._builder.answer is not None:
            told = response.finished.usage.completion_tokens
            if told != len(self.tokens):
                self.problem = f"told of {told} tokens, and {len(self.tokens)}"
            self._end(None)

    def _failed(self, broken: Broken) -> None:
        last_s = self._sim.now
        self._pause(lambda: self._course.failed(broken, last_s, self._left_s))

    def _pause(self, decide: Callable[[], float | None]) -> None:
        """Have the course decide, and go on after the pause that it wants; None: with its last message."""
        self._leave()
        try:
            pause_s = decide()
            if pause_s is None:
                assert self._course.last is not None, "the answer was there before"
                self._take(self._course.last)
            else:
                self._sim.call_later(pause_s, self._open)
        except PrefixmeshError as error:
            self._end(error)

    def _told_wrong(self, problem: str) -> None:
        self.problem = problem
        self._end(InternalError(problem))

    def _end(self, error: PrefixmeshError | None) -> None:
        if self.ended_at is not None:
            return
        self.ended_at, self.error = self._sim.now, error
        self._leave()
        given_back = None if error is None or self.has_left else self._course.give_back()
        if given_back is not None:
            self._ask_route(given_back, lambda _: None)
        self._on_end(self)

    def _leave(self) -> None:
        """Want nothing more of the call that is under way."""
        self._number += 1
        for stream in (self._stream, self._answer, self._direct):
            if stream is not None:
                stream.leave()
        self._stream = self._answer = self._direct = None

    def _of_now(self, act: Callable[..., object]) -> Callable[..., None]:
        """``act``, for as long as the call that is opened now is the one that counts."""
        number = self._number

        def only_then(*arguments: object) -> None:
            if number == self._number and self.ended_at is None:
                act(*arguments)

        return only_then

    @property
    def _left_s(self) -> float:
        return max(0.0, self.deadline - self._sim.now)

    def _as_question(self, request: pb.GenerateRequest) -> Question:
        return Question(
            namespace=self.question.namespace,
            prompt=request.tokens.ids,
            max_tokens=request.sampling.max_tokens,
            resumed=request.resumed_output,
        )

    def __repr__(self) -> str:
        state = "open" if self.ended_at is None else "ended" if self.error is None else self.error.reason
        way = "carried" if self._course.plan is None else "direct"
        of = self.question.max_tokens
        return f"<SimulatedClient {self.name}: {len(self.tokens)} of {of} tokens, {way}, {state}>"


def _broken(error: PrefixmeshError) -> Broken:
    """What the server itself has said; as ``client.target`` judges it."""
    is_refusal = isinstance(error, UnavailableError | AuthenticationError)
    return Broken(error, Failure.REFUSED if is_refusal else Failure.CALLERS)
