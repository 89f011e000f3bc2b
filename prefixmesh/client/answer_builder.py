"""From the wire's events to typed results. Pure: no channel, no clock, so both clients share it.

A stream is ``Started``, then deltas, then ``Finished``, and with several branches an end for each before that; ``AnswerBuilder`` checks
that order, so that a lost or repeated piece becomes an error and never a wrong answer.
"""

from collections.abc import Sequence
from typing import Final

from prefixmesh import tokens
from prefixmesh.client.answer import (
    Answer,
    Branch,
    CachedTokens,
    FinishReason,
    PrefillSavings,
    Routing,
    Started,
    TextDelta,
    Timings,
    TokenLogprobs,
)
from prefixmesh.errors import InternalError, InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb

_REASONS: Final[dict[int, FinishReason]] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


class AnswerBuilder:
    """Folds the responses of one call into its answer."""

    def __init__(self, sent_at_s: float, begun: Sequence[int] = (0,)) -> None:
        """``sent_at_s`` is when the request was sent, ``begun`` how many tokens of each answer that it asked for were there already."""
        self.sent_at_s: Final = sent_at_s
        self._first_token_s: float | None = None
        self._branches = [_BranchBuilder(first_position) for first_position in begun]
        self.started: Started | None = None
        """Set by the first response."""

        self.answer: Answer | None = None
        """Set by the last response."""

    def __repr__(self) -> str:
        state = "finished" if self.answer else "started" if self.started else "waiting"
        return f"{state}, {sum(len(branch.token_ids) for branch in self._branches)} tokens"

    def add(self, response: pb.GenerateResponse, now_s: float) -> TextDelta | None:
        """Take the next response, received at ``now_s``; the delta it carries, else None. O(size of the response).

        Raises InternalError when the responses do not follow each other as they must.
        """
        if self.answer is not None:
            raise InternalError("the server went on after the end of the answer")
        match response.WhichOneof("event"):
            case "started":
                self._start(response.started)
            case "delta":
                return self._extend(response.delta, now_s)
            case "branch_ended":
                ended = response.branch_ended
                self._branch(ended.branch).end(_REASONS.get(ended.reason, "other"))
            case "finished":
                self._finish(response.finished, now_s)
            case _:
                pass  # an event newer than this client
        return None

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has come: a token, or an end."""
        return self.answer is not None or any(branch.has_begun for branch in self._branches)

    def begin_again(self) -> None:
        """Forget who began with an answer of which nothing has come: another attempt is made. Raises InternalError when some has."""
        if self.has_begun:
            raise InternalError("an answer that has begun cannot begin again")
        self.started = None

    def end(self) -> Answer:
        """The answer, once the stream has ended well; raises InternalError when it ended too early."""
        if self.answer is None:
            raise InternalError("the stream ended before the answer did")
        return self.answer

    def finished_answer(self) -> Answer:
        """The answer, for who has read the stream to its end; raises InvalidRequestError before: half an answer never passes for a whole one."""
        if self.answer is None:
            raise InvalidRequestError("stream", "has an answer once it was read to its end, and was not")
        return self.answer

    def _start(self, event: pb.Started) -> None:
        if self.started is not None:
            raise InternalError("the server started the answer twice")
        self.started = Started(
            request_id=event.request_id,
            worker_id=event.worker_id,
            model=event.model,
            prompt_tokens=event.prompt_tokens,
            cached=_cached(event.cached_tokens),
            namespace_digest=event.namespace_digest,
            seed=event.seed,
            adapter_digest=event.adapter_digest,
            routing=_routing(event.routing) if event.HasField("routing") else None,
        )

    def _extend(self, event: pb.Delta, now_s: float) -> TextDelta:
        if self.started is None:
            raise InternalError("the answer's first token came before its start")
        if self._first_token_s is None:
            self._first_token_s = now_s - self.sent_at_s
        return self._branch(event.branch).extend(event)

    def _branch(self, number: int) -> "_BranchBuilder":
        if not 0 <= number < len(self._branches):
            raise InternalError(f"the server sent branch {number} of {len(self._branches)}")
        return self._branches[number]

    def _finish(self, event: pb.Finished, now_s: float) -> None:
        if self.started is None:
            raise InternalError("the answer ended before its start")
        if len(self._branches) == 1:
            self._branches[0].end(_REASONS.get(event.reason, "other"))
        usage, timings = event.usage, event.timings
        self.answer = Answer(
            branches=tuple(branch.build(number) for number, branch in enumerate(self._branches)),
            prompt_tokens=usage.prompt_tokens,
            cached=_cached(usage.cached_tokens),
            prefill_saved=_saved(usage.prefill_saved) if usage.HasField("prefill_saved") else None,
            completion_tokens=usage.completion_tokens,
            interruptions=usage.interruptions,
            retokenized_tokens=usage.retokenized_tokens,
            first_token_s=self._first_token_s,
            total_s=now_s - self.sent_at_s,
            timings=Timings(
                queued_ms=timings.queued_ms,
                prefill_ms=timings.prefill_ms,
                first_token_ms=timings.first_token_ms,
                decode_ms=timings.decode_ms,
                load_back_ms=timings.load_back_ms,
            ),
            started=self.started,
        )


class _BranchBuilder:
    """Folds one branch's deltas."""

    def __init__(self, first_position: int) -> None:
        self._first_position = first_position
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason: FinishReason | None = None
        self.token_ids: list[int] = []

    @property
    def has_begun(self) -> bool:
        return bool(self.token_ids or self._texts or self._reason)

    def extend(self, event: pb.Delta) -> TextDelta:
        if self._reason is not None:
            raise InternalError(f"branch {event.branch} went on after its end")
        due = self._first_position + len(self.token_ids)
        if event.position != due:
            raise InternalError(f"the answer has a gap: token {event.position} came where {due} was due")
        token_ids = unpack_ids(event.token_ids)
        self.token_ids.extend(token_ids)
        self._texts.append(event.text)
        logprobs = tuple(map(_logprobs, event.logprobs))
        self._logprobs.extend(logprobs)
        return TextDelta(event.text, token_ids, event.position, logprobs, event.branch)

    def end(self, reason: FinishReason) -> None:
        if self._reason is not None:
            raise InternalError("the server ended a branch twice")
        self._reason = reason

    def build(self, number: int) -> Branch:
        if self._reason is None:
            raise InternalError(
                f"the server finished without branch {number}; one that is older than branches answers once"
            )
        return Branch(
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self._reason,
            logprobs=tuple(self._logprobs),
        )


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Packed ids as Python ints; raises InternalError when the bytes are not whole ids."""
    if len(packed) % tokens.TOKEN_BYTES:
        raise InternalError(f"the server sent {len(packed)} bytes of token ids, not a multiple of 4")
    return tuple(tokens.unpack(packed).tolist())


def _cached(message: pb.CachedTokens) -> CachedTokens:
    return CachedTokens(device=message.device, host=message.host, disk=message.disk, peer=message.peer)


def _saved(message: pb.PrefillSavings) -> PrefillSavings:
    return PrefillSavings(linear=message.linear, attention=message.attention, total=message.total)


def _logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob, tuple(zip(unpack_ids(message.top_ids), message.top_logprobs, strict=False))
    )


def _routing(message: pb.Routing) -> Routing:
    return Routing(
        policy=message.policy,
        predicted_cached_tokens=message.predicted_cached_tokens,
        predicted_first_token_ms=message.predicted_first_token_ms,
    )
