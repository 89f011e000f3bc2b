"""A caller in simulated time: it asks a router over the network, keeps what it is told, and goes on at another router when one dies.

As the client library does through the proxy: one deadline over all that it tries; once tokens were told, it asks for what comes after
them, and takes nothing that does not follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from prefixmesh.answer_record import AnswerRecord
from prefixmesh.errors import CancelledError, DeadlineError, PrefixmeshError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_request import Question
from prefixmesh.sim.simulated_router import AnswerEnd, SimulatedRouter
from prefixmesh.tokens import unpack

ASK_AGAIN_S: Final = 0.2
"""After a router was not there."""

BUFFER: Final = 1 << 16
"""Messages of one answer that wait for its caller: more than the longest has."""


class SimulatedClient:
    """One request of one caller. ``begin`` it once."""

    def __init__(
        self,
        sim: Simulation,
        network: Network,
        name: str,
        routers: Sequence[SimulatedRouter],
        question: Question,
        timeout_s: float,
        on_end: Callable[["SimulatedClient"], object],
    ) -> None:
        """``routers`` are asked in this order, round and round."""
        self.name = name
        self.question = question
        self.error: PrefixmeshError | None = None
        """What it ended in; None where it has its answer, or has not ended."""

        self.ended_at: float | None = None
        self.ends = 0
        """How often it was told of an end."""

        self.asked = 0
        """How many routers it has asked."""

        self.deadline = sim.now + timeout_s
        self._sim = sim
        self._network = network
        self._routers = routers
        self._on_end = on_end
        self._record = AnswerRecord(1, [question.resumed])
        self._answer: Stream[pb.GenerateResponse | AnswerEnd] | None = None

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        ids: list[int] = unpack(self._record.branches[0].packed).tolist()
        return ids

    def begin(self) -> None:
        """Ask."""
        self._sim.call_at(
            self.deadline, self._end, DeadlineError("the deadline passed before the answer was whole")
        )
        self._ask()

    def cancel(self) -> None:
        """Want it no more. Ended already: nothing happens."""
        self._end(CancelledError("the caller wants no more"))

    def _ask(self) -> None:
        if self.ended_at is not None:
            return
        router, number = self._routers[self.asked % len(self._routers)], self.asked
        self.asked += 1
        request = pb.GenerateRequest(resumed_output=self.question.resumed)
        self._record.resume(request)
        question = replace(self.question, resumed=request.resumed_output)
        self._answer = open_call(
            self._network,
            self.name,
            router.name,
            lambda answer: router.serve(question, self.deadline - self._sim.now, answer),
            lambda message: self._on_message(message) if number == self.asked - 1 else None,
            lambda: self._on_broken() if number == self.asked - 1 else None,
            buffer=BUFFER,
        )

    def _on_message(self, message: pb.GenerateResponse | AnswerEnd) -> None:
        if self.ended_at is not None:
            return
        if isinstance(message, AnswerEnd):
            self.ends += 1
            self._end(message.error)
            return
        try:
            # The first router's messages are taken like all others: what does not follow is found.
            self._record.continued(message, self._sim.now)
        except UnavailableError as error:
            self._end(error)

    def _on_broken(self) -> None:
        if self.ended_at is None:
            self._record.interrupted()
            self._answer = None
            self._sim.call_later(ASK_AGAIN_S, self._ask)

    def _end(self, error: PrefixmeshError | None) -> None:
        if self.ended_at is not None:
            return
        self.ended_at, self.error = self._sim.now, error
        if self._answer is not None:
            self._answer.leave()
        self._on_end(self)

    def __repr__(self) -> str:
        state = "open" if self.ended_at is None else "ended" if self.error is None else self.error.reason
        return (
            f"<SimulatedClient {self.name}: {len(self.tokens)} of {self.question.max_tokens} tokens, {state}>"
        )
