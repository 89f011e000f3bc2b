"""One answer on its way out: the engine's events in, deltas out. A call may have several; ``call_answer`` joins them.

Pure: it neither waits nor sends. Stop strings are made of text, and the engine knows only tokens: one that is found here ends the
answer, and the service aborts the request in the engine.
"""

from collections.abc import Sequence
from typing import Final, Literal

from prefixmesh.errors import InternalError, InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.tokens import pack
from prefixmesh.worker.ended_errors import problem_of, refusal_of
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokenLogprobs, TokensOut

RESUMED_FIELD: Final = "resumed_output"
"""What the engine, to which each answer is a request of its own, calls the tokens that it goes on from."""


class AnswerStream:
    """State of one answer. Feed it every event in order, until ``finished``."""

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        resumed: Sequence[int] = (),
        branch: int = 0,
        resumed_field: str = RESUMED_FIELD,
    ) -> None:
        """``resumed_field`` is where the caller's request has ``resumed``."""
        self._branch = branch
        self._resumed_field = resumed_field
        self._detokenizer = detokenizer
        self._resumed_tokens = len(resumed)
        # Whoever sent these ids had, and has, the text that was certain after them.
        before = detokenizer.push(resumed)
        self._texts = [before.text]
        self.token_ids = list(resumed)
        """The answer's ids so far, those that were resumed first, up to and with the one that completed a stop string."""

        self.stop_found = before.stopped
        """A stop string ended the answer: the request can be aborted in the engine."""

        self.admitted: Admitted | None = None
        """What the engine said when it began with it; None before."""

        self.ended: Ended | None = None
        """The engine's last event; None while the answer goes on."""

        self.finished: Literal["stop", "length"] | None = None
        """How the answer ended; None while it goes on."""

    @property
    def text(self) -> str:
        """All text that was sent, before an interruption too."""
        return "".join(self._texts)

    @property
    def completion_tokens(self) -> int:
        """Tokens that were generated for this call."""
        return len(self.token_ids) - self._resumed_tokens

    def on_event(self, event: RequestEvent) -> list[pb.Delta]:
        """What ``event`` adds to the answer, in order. Raises the error that the call ends with."""
        match event:
            case Admitted():
                self.admitted = event
                return []
            case TokensOut():
                return self._on_tokens(event)
            case Ended():
                return self._on_ended(event)
            case Refused(field=field) if field == RESUMED_FIELD:
                raise InvalidRequestError(self._resumed_field, event.problem)
            case Refused():
                raise refusal_of(event)

    def _on_tokens(self, event: TokensOut) -> list[pb.Delta]:
        if self.stop_found:
            return []
        position = len(self.token_ids)
        if event.position != position:
            raise InternalError(f"the engine sent token {event.position} of an answer, {position} was next")
        certain = self._detokenizer.push(event.token_ids)
        self.stop_found = certain.stopped
        used = event.token_ids[: certain.tokens_used] if certain.stopped else event.token_ids
        self.token_ids += used
        return [self._delta(position, pack(used), certain.text, event.logprobs[: len(used)])]

    def _on_ended(self, event: Ended) -> list[pb.Delta]:
        problem = problem_of(event)
        if problem is not None and not (event.reason == "aborted" and self.stop_found and self.admitted):
            raise problem
        rest = self._detokenizer.finish()
        self.stop_found = self._detokenizer.stopped
        self.ended = event
        self.finished = "length" if event.reason == "length" and not self.stop_found else "stop"
        return [self._delta(len(self.token_ids), b"", rest)] if rest else []

    def _delta(
        self, position: int, packed: bytes, text: str, logprobs: Sequence[TokenLogprobs] = ()
    ) -> pb.Delta:
        self._texts.append(text)
        told = [
            pb.TokenLogprobs(logprob=one.logprob, top_ids=pack(one.top_ids), top_logprobs=one.top_logprobs)
            for one in logprobs
        ]
        return pb.Delta(position=position, token_ids=packed, text=text, logprobs=told, branch=self._branch)
