"""From the wire's events to typed results. Pure: no channel, no clock, so both clients share it.

A stream is ``Started``, then deltas, then ``Finished``; ``AnswerBuilder`` checks that order, so that a lost or repeated piece
becomes an error and never a wrong answer.
"""

from dataclasses import dataclass
from typing import Final, Literal

from prefixmesh import tokens
from prefixmesh.errors import InternalError
from prefixmesh.proto.v1 import inference_pb2 as pb

FinishReason = Literal["stop", "length", "other"]

_REASONS: Final[dict[int, FinishReason]] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedTokens:
    """Prompt tokens whose KV was found, by the tier it was found on."""

    device: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Tokens found on any tier."""
        return self.device + self.host


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a router placed the request, and what it expected."""

    policy: str
    predicted_cached_tokens: int
    predicted_first_token_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The request is being computed; what was found in the cache is known."""

    request_id: str
    """The server's id of the request; ``abort`` takes it."""

    worker_id: str
    model: str
    prompt_tokens: int
    cached: CachedTokens
    namespace_digest: str
    """Equal for requests that may share cached prefixes."""

    seed: int
    """The seed in use: the one that was asked for, or the one the server drew."""

    routing: Routing | None
    """None when a worker was called directly."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities by the model alone: before penalties, biases, temperature and filters."""

    logprob: float
    """Of the token that was chosen."""

    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at its place with theirs, the likeliest first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of an answer."""

    text: str
    """Certain text; empty while it is still held back (half a character, the beginning of a stop string)."""

    token_ids: tuple[int, ...]
    position: int
    """Position of the first of these tokens in the answer, from 0."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token; empty unless they were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Milliseconds, as the worker measured them."""

    queued_ms: float
    prefill_ms: float
    first_token_ms: float
    decode_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    """``stop``: the model ended its turn or a stop was met; ``length``: a limit was reached; ``other``: a reason newer than this client."""

    prompt_tokens: int
    cached: CachedTokens
    """Prompt tokens that were not computed again, by tier."""

    completion_tokens: int
    retokenized_tokens: int
    """Tokens of earlier answers in a chat's history whose generated ids the router did not remember."""

    first_token_s: float | None
    """Seconds from sending the request to the first token's arrival here; None when there was no token."""

    total_s: float
    """Seconds from sending the request to its end."""

    timings: Timings
    started: Started
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token; empty unless they were asked for."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.cached.total

    @property
    def worker_id(self) -> str:
        """The worker that computed the answer."""
        return self.started.worker_id

    @property
    def model(self) -> str:
        """The model that answered."""
        return self.started.model

    @property
    def request_id(self) -> str:
        """The server's id of the request."""
        return self.started.request_id


class AnswerBuilder:
    """Folds the responses of one call into its answer."""

    def __init__(self, sent_at_s: float) -> None:
        self._sent_at_s = sent_at_s
        self._first_token_s: float | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.started: Started | None = None
        """Set by the first response."""

        self.answer: Answer | None = None
        """Set by the last response."""

    def __repr__(self) -> str:
        state = "finished" if self.answer else "started" if self.started else "waiting"
        return f"{state}, {len(self._token_ids)} tokens"

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
            case "finished":
                self._finish(response.finished, now_s)
            case _:
                pass  # an event newer than this client
        return None

    def end(self) -> Answer:
        """The answer, once the stream has ended well; raises InternalError when it ended too early."""
        if self.answer is None:
            raise InternalError("the stream ended before the answer did")
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
            routing=_routing(event.routing) if event.HasField("routing") else None,
        )

    def _extend(self, event: pb.Delta, now_s: float) -> TextDelta:
        if self.started is None:
            raise InternalError("the answer's first token came before its start")
        if event.position != len(self._token_ids):
            raise InternalError(
                f"the answer has a gap: token {event.position} came where {len(self._token_ids)} was due"
            )
        if self._first_token_s is None:
            self._first_token_s = now_s - self._sent_at_s
        token_ids = unpack_ids(event.token_ids)
        self._token_ids.extend(token_ids)
        self._texts.append(event.text)
        logprobs = tuple(map(_logprobs, event.logprobs))
        self._logprobs.extend(logprobs)
        return TextDelta(event.text, token_ids, event.position, logprobs)

    def _finish(self, event: pb.Finished, now_s: float) -> None:
        if self.started is None:
            raise InternalError("the answer ended before its start")
        usage, timings = event.usage, event.timings
        self.answer = Answer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=_REASONS.get(event.reason, "other"),
            prompt_tokens=usage.prompt_tokens,
            cached=_cached(usage.cached_tokens),
            completion_tokens=usage.completion_tokens,
            retokenized_tokens=usage.retokenized_tokens,
            first_token_s=self._first_token_s,
            total_s=now_s - self._sent_at_s,
            timings=Timings(
                queued_ms=timings.queued_ms,
                prefill_ms=timings.prefill_ms,
                first_token_ms=timings.first_token_ms,
                decode_ms=timings.decode_ms,
            ),
            started=self.started,
            logprobs=tuple(self._logprobs),
        )


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Packed ids as Python ints; raises InternalError when the bytes are not whole ids."""
    if len(packed) % tokens.TOKEN_BYTES:
        raise InternalError(f"the server sent {len(packed)} bytes of token ids, not a multiple of 4")
    return tuple(tokens.unpack(packed).tolist())


def _cached(message: pb.CachedTokens) -> CachedTokens:
    return CachedTokens(device=message.device, host=message.host)


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
