"""The messages both clients send and receive, between the caller's terms and the wire's. No channel, no clock.

Everything a caller passes is checked here, before anything is sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypedDict

from prefixmesh.client.answer_builder import AnswerBuilder, unpack_ids
from prefixmesh.client.checks import (
    PromptLike,
    check_bias,
    check_ids,
    check_integer,
    check_prompt,
    check_real,
    check_schema,
    check_text,
)
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import ChatPrompt, GenerateRequest, SamplingParams, TextPrompt, TokenPrompt
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES
from prefixmesh.tokens import count

_DEFAULTS: Final = SamplingParams()
_NO_BIAS: Final[Mapping[int, float]] = MappingProxyType({})


class GenerateOptions(TypedDict, total=False):
    """What a caller may choose for one answer. What is left out takes the defaults of ``SamplingParams``."""

    temperature: float
    """0 is greedy. 0 to 100."""

    top_k: int
    """Keep the k likeliest tokens; 0 keeps all."""

    top_p: float
    """Keep the likeliest tokens up to this sum of probabilities; above 0, at most 1."""

    min_p: float
    """Drop tokens less likely than this share of the likeliest; 0 to 1."""

    max_tokens: int | None
    """Most output tokens; None: what the context leaves. 0 computes the prompt and answers nothing."""

    seed: int | None
    """Same seed, same answer; None lets the server draw one."""

    stop: str | Sequence[str]
    """The answer ends before the first of these strings."""

    stop_token_ids: Sequence[int]
    """The answer ends at any of these ids."""

    ignore_eos: bool
    """Go on past the model's own end of turn (for benchmarks)."""

    repetition_penalty: float
    """Above 1 makes tokens that prompt or answer hold already less likely, below 1 more. Above 0, at most 10."""

    frequency_penalty: float
    """Subtracted from a token's logit for every time it stands in the answer; -2 to 2."""

    presence_penalty: float
    """Subtracted once from the logit of every token that stands in the answer; -2 to 2."""

    logit_bias: Mapping[int, float]
    """Added to the logits of these token ids, after the penalties; -100 to 100, at most 1,024 ids."""

    min_tokens: int
    """Before so many tokens the answer does not end in a stop."""

    logprobs: int | None
    """Tell each token's log-probability by the model alone, and so many of the likeliest at its place, 0 to 20."""

    json_schema: str | Mapping[str, Any] | None
    """The answer is JSON that this schema allows. As JSON text, or as what that text means."""

    regex: str | None
    """The whole answer matches this regular expression (no look-around, no back references)."""

    resumed_output: Sequence[int]
    """Ids that were generated already: the answer goes on after them, and holds only what is new."""

    resumed_branches: Sequence[Sequence[int]]
    """What ``resumed_output`` is to one answer, for each of ``branches``, empty where one had not begun; none, or as many as these."""

    branches: int
    """Answers to compute from the one prompt, all on one worker, each with its own randomness. 1 to 64; see ``Answer.branches``."""

    priority: int
    """Higher goes first where the worker schedules by priority; -100 to 100."""

    queue_timeout_ms: int
    """Give up (QueueTimeoutError) when the request has waited so long to be begun with; 0 leaves it to the worker's own limit."""

    model: str
    """Empty: the model that is served."""

    adapter: str
    """LoRA adapter by name, one of ``ServedModel.adapters``; empty: the base model. It shares no cached prefix with the base model or with
    another adapter; ``Started.adapter_digest`` tells which weights the name meant."""

    extra_key: str
    """Narrows the sharing of cached prefixes within the caller's tenant. Any string of at most 1,024 bytes."""

    session: str
    """Your name for requests that belong together, such as the turns of a conversation: a router that is set to sends them to one worker where
    nothing else tells workers apart. At most 256 bytes."""

    request_id: str
    """The caller's own id, for the servers' logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model that can be asked for."""

    name: str
    revision: str
    context_length: int
    """Most tokens of prompt and answer together."""

    adapters: tuple[str, ...]


def build_generate(
    prompt: PromptLike,
    *,
    temperature: float = _DEFAULTS.temperature,
    top_k: int = _DEFAULTS.top_k,
    top_p: float = _DEFAULTS.top_p,
    min_p: float = _DEFAULTS.min_p,
    max_tokens: int | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    repetition_penalty: float = _DEFAULTS.repetition_penalty,
    frequency_penalty: float = _DEFAULTS.frequency_penalty,
    presence_penalty: float = _DEFAULTS.presence_penalty,
    logit_bias: Mapping[int, float] = _NO_BIAS,
    min_tokens: int = _DEFAULTS.min_tokens,
    logprobs: int | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    resumed_output: Sequence[int] = (),
    resumed_branches: Sequence[Sequence[int]] = (),
    branches: int = 1,
    priority: int = 0,
    queue_timeout_ms: int = 0,
    model: str = "",
    adapter: str = "",
    extra_key: str = "",
    session: str = "",
    request_id: str = "",
) -> pb.GenerateRequest:
    """The message of a Generate call; raises InvalidRequestError naming the field that breaks a limit."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    request = GenerateRequest(
        prompt=check_prompt(prompt),
        sampling=SamplingParams(
            temperature=check_real("sampling.temperature", temperature),
            top_k=check_integer("sampling.top_k", top_k),
            top_p=check_real("sampling.top_p", top_p),
            min_p=check_real("sampling.min_p", min_p),
            max_tokens=None if max_tokens is None else check_integer("sampling.max_tokens", max_tokens),
            seed=None if seed is None else check_integer("sampling.seed", seed),
            stop=tuple(check_text("sampling.stop", one) for one in stops),
            stop_token_ids=tuple(check_integer("sampling.stop_token_ids", one) for one in stop_token_ids),
            ignore_eos=bool(ignore_eos),
            repetition_penalty=check_real("sampling.repetition_penalty", repetition_penalty),
            frequency_penalty=check_real("sampling.frequency_penalty", frequency_penalty),
            presence_penalty=check_real("sampling.presence_penalty", presence_penalty),
            logit_bias=check_bias("sampling.logit_bias", logit_bias),
            min_tokens=check_integer("sampling.min_tokens", min_tokens),
            json_schema=None if json_schema is None else check_schema("sampling.json_schema", json_schema),
            regex=None if regex is None else check_text("sampling.regex", regex),
            logprobs=None if logprobs is None else check_integer("sampling.logprobs", logprobs),
        ),
        model=check_text("model", model),
        adapter=check_text("adapter", adapter),
        extra_key=check_text("extra_key", extra_key),
        resumed_output=check_ids("resumed_output", resumed_output),
        resumed_branches=tuple(
            check_ids(f"resumed_branches[{branch}]", ids) for branch, ids in enumerate(resumed_branches)
        ),
        branches=check_integer("branches", branches),
        priority=check_integer("priority", priority),
        queue_timeout_ms=check_integer("queue_timeout_ms", queue_timeout_ms),
        session=check_text("session", session),
        client_request_id=check_text("request_id", request_id),
    )
    message = codec.encode_generate(request)
    _check_size(message)
    return message


def begin_answer(request: pb.GenerateRequest, sent_at_s: float) -> AnswerBuilder:
    """What folds the responses to ``request``, which is sent at ``sent_at_s``."""
    resumed = request.resumed_branches or [request.resumed_output] * max(1, request.branches)
    return AnswerBuilder(sent_at_s, [count(packed) for packed in resumed])


def build_tokenize(prompt: PromptLike, model: str) -> pb.TokenizeRequest:
    """The message of a Tokenize call; raises InvalidRequestError."""
    message = pb.TokenizeRequest(model=check_text("model", model))
    match GenerateRequest(prompt=check_prompt(prompt)).prompt:
        case TextPrompt(text=text):
            message.text = text
        case ChatPrompt(messages=messages):
            message.chat.CopyFrom(codec.encode_chat(messages))
        case TokenPrompt():
            raise InvalidRequestError("prompt", "is tokens already")
    _check_size(message)
    return message


def build_abort(request_id: str) -> pb.AbortRequest:
    """The message of an Abort call; raises InvalidRequestError."""
    if not request_id:
        raise InvalidRequestError("request_id", "must not be empty")
    return pb.AbortRequest(request_id=check_text("request_id", request_id))


def read_tokenize(response: pb.TokenizeResponse) -> tuple[int, ...]:
    """The ids of a Tokenize answer."""
    return unpack_ids(response.ids)


def read_models(response: pb.ListModelsResponse) -> tuple[ServedModel, ...]:
    """The models of a ListModels answer."""
    return tuple(
        ServedModel(
            name=model.name,
            revision=model.revision,
            context_length=model.context_length,
            adapters=tuple(model.adapters),
        )
        for model in response.models
    )


def _check_size(message: pb.GenerateRequest | pb.TokenizeRequest) -> None:
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            "request", f"is {size} bytes; at most {MAX_MESSAGE_BYTES} bytes fit one message"
        )
