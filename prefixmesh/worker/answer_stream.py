"""One answer on its way out: the engine's events in, wire messages out.

Pure: it neither waits nor sends. The service feeds it events, sends what it returns, and aborts the request in the engine when
a stop string has been found (stop strings are made of text, and the engine knows only tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from prefixmesh.cache.namespace import short_digest
from prefixmesh.errors import (
    CancelledError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
)
from prefixmesh.ids import Namespace, RequestId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.tokens import pack
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokenLogprobs, TokensOut

_REASONS: Final = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of an answer before the engine says anything."""

    request_id: RequestId
    worker_id: str
    model: str
    namespace: Namespace
    prompt_tokens: int
    retokenized_tokens: int
    seed: int
    prepared_ms: float
    """Milliseconds from the call's arrival to its submission to the engine, which knows nothing of them."""


class AnswerStream:
    """State of one answer. Feed it every event in order, until ``finished``."""

    def __init__(
        self, head: AnswerHead, detokenizer: IncrementalDetokenizer, resumed: Sequence[int] = ()
    ) -> None:
        self._head = head
        self._detokenizer = detokenizer
        self._queued_ms = 0.0
        self._resumed_tokens = len(resumed)
        # Whoever sent these ids had, and has, the text that was certain after them.
        before = detokenizer.push(resumed)
        self._texts = [before.text]
        self.token_ids = list(resumed)
        """The answer's ids so far, those that were resumed first, up to and with the one that completed a stop string."""

        self.cached_tokens = 0
        self.stop_found = before.stopped
        """A stop string ended the answer: the request can be aborted in the engine."""

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

    def on_event(self, event: RequestEvent) -> list[pb.GenerateResponse]:
        """The messages that ``event`` gives rise to, in order. Raises the error that the call ends with."""
        match event:
            case Admitted():
                return [self._on_admitted(event)]
            case TokensOut():
                return self._on_tokens(event)
            case Ended():
                return self._on_ended(event)
            case Refused():
                raise _refusal(event)

    def _on_admitted(self, event: Admitted) -> pb.GenerateResponse:
        head = self._head
        self.cached_tokens = event.cached_tokens
        self._queued_ms = head.prepared_ms + event.queued_ms
        started = pb.Started(
            request_id=head.request_id,
            worker_id=head.worker_id,
            model=head.model,
            prompt_tokens=head.prompt_tokens,
            cached_tokens=pb.CachedTokens(device=event.cached_tokens),
            namespace_digest=short_digest(head.namespace),
            seed=head.seed,
        )
        return pb.GenerateResponse(started=started)

    def _on_tokens(self, event: TokensOut) -> list[pb.GenerateResponse]:
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

    def _on_ended(self, event: Ended) -> list[pb.GenerateResponse]:
        if event.reason == "failed":
            raise InternalError(event.error or "the engine failed on this request")
        if event.reason == "no_room":
            raise OverloadedError(event.error or "the engine has no room for this request")
        if event.reason == "aborted" and not self.stop_found:
            raise CancelledError("the request was aborted")
        messages = []
        rest = self._detokenizer.finish()
        self.stop_found = self._detokenizer.stopped
        self.finished = "length" if event.reason == "length" and not self.stop_found else "stop"
        if rest:
            messages.append(self._delta(len(self.token_ids), b"", rest))
        messages.append(self._finished(_REASONS[self.finished], event))
        return messages

    def _delta(
        self, position: int, packed: bytes, text: str, logprobs: Sequence[TokenLogprobs] = ()
    ) -> pb.GenerateResponse:
        self._texts.append(text)
        told = [
            pb.TokenLogprobs(logprob=one.logprob, top_ids=pack(one.top_ids), top_logprobs=one.top_logprobs)
            for one in logprobs
        ]
        return pb.GenerateResponse(
            delta=pb.Delta(position=position, token_ids=packed, text=text, logprobs=told)
        )

    def _finished(self, reason: pb.FinishReason, event: Ended) -> pb.GenerateResponse:
        head = self._head
        usage = pb.Usage(
            prompt_tokens=head.prompt_tokens,
            cached_tokens=pb.CachedTokens(device=self.cached_tokens),
            completion_tokens=self.completion_tokens,
            resumed_tokens=self._resumed_tokens,
            retokenized_tokens=head.retokenized_tokens,
        )
        timings = pb.Timings(
            queued_ms=self._queued_ms,
            prefill_ms=event.prefill_ms,
            first_token_ms=head.prepared_ms + event.first_token_ms,
            decode_ms=event.decode_ms,
        )
        return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage, timings=timings))


def _refusal(event: Refused) -> PrefixmeshError:
    if event.field:
        return InvalidRequestError(event.field, event.problem)
    return OverloadedError(event.problem)
