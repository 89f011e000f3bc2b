"""Between wire messages and domain types: what breaks a limit is refused here, with the field's name.

Used by both ends: the client encodes what router and worker decode. Nothing here knows a tokenizer or a model; limits that
depend on them are checked where they are known.
"""

from functools import lru_cache
from typing import Final, get_args

from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import (
    MAX_BRANCHES,
    MAX_CHAT_MESSAGES,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    Role,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

_ROLES: Final[dict[str, Role]] = {role: role for role in get_args(Role)}
PROTOCOL_VERSION: Final = 1

REMEMBERED_SAMPLINGS: Final = 1024
SMALL_SAMPLING_BYTES: Final = 256
"""Most callers send the same few parameters again and again: checked once, 10 µs a call are saved. Together a few hundred kB at most."""


def decode_generate(message: pb.GenerateRequest) -> GenerateRequest:
    """The domain form of a Generate call; raises InvalidRequestError."""
    return GenerateRequest(
        prompt=_decode_prompt(message),
        sampling=_decode_sampling(message.sampling),
        model=message.model,
        adapter=message.adapter,
        extra_key=message.extra_key,
        resumed_output=message.resumed_output,
        resumed_branches=_decode_resumed(message),
        branches=message.branches or 1,  # absent, and from callers of before there were branches
        priority=message.priority,
        queue_timeout_ms=message.queue_timeout_ms,
        session=message.session,
        client_request_id=message.request_id,
    )


def decode_tokenize(message: pb.TokenizeRequest) -> Prompt:
    """The prompt of a Tokenize call; raises InvalidRequestError."""
    return GenerateRequest(prompt=_decode_prompt(message)).prompt


def encode_generate(request: GenerateRequest) -> pb.GenerateRequest:
    """The wire form of a Generate call; raises InvalidRequestError for text that UTF-8 cannot carry."""
    try:
        return _encode_generate(request)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "request", f"text must be valid Unicode; it has a lone surrogate ({error.reason})"
        ) from error


def _encode_generate(request: GenerateRequest) -> pb.GenerateRequest:
    sampling = request.sampling
    message = pb.GenerateRequest(
        request_id=request.client_request_id,
        model=request.model,
        adapter=request.adapter,
        extra_key=request.extra_key,
        resumed_output=request.resumed_output,
        resumed_branches=request.resumed_branches,
        branches=request.branches if request.branches > 1 else 0,
        priority=request.priority,
        queue_timeout_ms=request.queue_timeout_ms,
        session=request.session,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=sampling.logit_bias,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            json_schema=sampling.json_schema,
            regex=sampling.regex,
        ),
    )
    match request.prompt:
        case TextPrompt(text=text):
            message.text = text
        case ChatPrompt(messages=messages):
            message.chat.CopyFrom(encode_chat(messages))
        case TokenPrompt(packed=packed):
            message.tokens.ids = packed
    return message


def encode_chat(messages: tuple[ChatMessage, ...]) -> pb.ChatPrompt:
    """The wire form of a conversation."""
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=m.role, content=m.content) for m in messages])


def _decode_prompt(message: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return _decode_chat(message.chat)
        case "tokens" if isinstance(message, pb.GenerateRequest):
            return TokenPrompt(message.tokens.ids)
        case _:
            kinds = "text, chat or tokens" if isinstance(message, pb.GenerateRequest) else "text or chat"
            raise InvalidRequestError("prompt", f"one of {kinds} is required")


def _decode_resumed(message: pb.GenerateRequest) -> tuple[bytes, ...]:
    if not message.resumed_branches:
        return ()
    # Counted before they are copied: a message may carry millions.
    if len(message.resumed_branches) > MAX_BRANCHES:
        raise InvalidRequestError(
            "resumed_branches", f"at most {MAX_BRANCHES} allowed, got {len(message.resumed_branches)}"
        )
    return tuple(message.resumed_branches)


def _decode_chat(chat: pb.ChatPrompt) -> ChatPrompt:
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError(
            "chat.messages", f"at most {MAX_CHAT_MESSAGES} messages allowed, got {len(chat.messages)}"
        )
    messages: list[ChatMessage] = []
    for index, entry in enumerate(chat.messages):
        role = _ROLES.get(entry.role)
        if role is None:
            allowed = ", ".join(_ROLES)
            raise InvalidRequestError(
                f"chat.messages[{index}].role", f"must be one of {allowed}, got {entry.role[:40]!r}"
            )
        messages.append(ChatMessage(role, entry.content))
    return ChatPrompt(tuple(messages))


def _decode_sampling(message: pb.Sampling) -> SamplingParams:
    if message.ByteSize() > SMALL_SAMPLING_BYTES:
        return _read_sampling(message)
    return _known_sampling(message.SerializeToString())


@lru_cache(maxsize=REMEMBERED_SAMPLINGS)
def _known_sampling(serialized: bytes) -> SamplingParams:
    return _read_sampling(pb.Sampling.FromString(serialized))


def _read_sampling(message: pb.Sampling) -> SamplingParams:
    # Counted before they are copied: a message may carry millions.
    if len(message.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            "sampling.stop", f"at most {MAX_STOP_STRINGS} strings allowed, got {len(message.stop)}"
        )
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            "sampling.stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids allowed, got {len(message.stop_token_ids)}",
        )
    if len(message.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            "sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} ids allowed, got {len(message.logit_bias)}"
        )
    defaults = SamplingParams()
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else defaults.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        min_p=message.min_p,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        repetition_penalty=(
            message.repetition_penalty
            if message.HasField("repetition_penalty")
            else defaults.repetition_penalty
        ),
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        json_schema=message.json_schema if message.HasField("json_schema") else None,
        regex=message.regex if message.HasField("regex") else None,
    )
