"""Wire messages and domain types say the same thing, and nothing beyond a limit gets through."""

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import (
    MAX_BRANCHES,
    MAX_CHAT_MESSAGES,
    ROLES,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


PROMPTS = st.one_of(
    st.builds(TextPrompt, TEXTS),
    st.builds(TokenPrompt, st.lists(st.binary(min_size=4, max_size=4), min_size=1).map(b"".join)),
    st.builds(
        ChatPrompt,
        st.lists(st.builds(ChatMessage, st.sampled_from(ROLES), TEXTS), min_size=1, max_size=4).map(tuple),
    ),
)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=floats(2**-20, 1),
    min_p=floats(0, 1),
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(TEXTS, max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    repetition_penalty=floats(2**-20, 10),
    frequency_penalty=floats(-2, 2),
    presence_penalty=floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), floats(-100, 100), max_size=3),
    min_tokens=st.just(0),
    logprobs=st.none() | st.integers(0, 20),
    json_schema=st.none(),
    regex=st.none() | TEXTS,
)
REQUESTS = st.builds(
    GenerateRequest,
    prompt=PROMPTS,
    sampling=SAMPLINGS,
    model=TEXTS,
    adapter=TEXTS,
    extra_key=TEXTS,
    session=TEXTS,
    resumed_output=st.binary().map(lambda data: data[: len(data) // 4 * 4]),
    priority=st.integers(-100, 100),
    queue_timeout_ms=st.integers(0, 3_600_000),
)


@given(REQUESTS)
def test_a_request_survives_the_wire(request: GenerateRequest) -> None:
    """Decoding what was encoded gives the same request, through real bytes."""
    data = codec.encode_generate(request).SerializeToString()
    assert codec.decode_generate(pb.GenerateRequest.FromString(data)) == request


@pytest.mark.parametrize("branches", [1, 2, MAX_BRANCHES])
def test_branches_survive_the_wire(branches: int) -> None:
    """Zero means one there, as it does to callers of before there were branches."""
    request = GenerateRequest(prompt=TextPrompt("a"), branches=branches)
    assert codec.decode_generate(codec.encode_generate(request)) == request
    assert codec.decode_generate(pb.GenerateRequest(text="a", branches=0)).branches == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"branches": -1}, "branches: must be at least 1 and at most 64, got -1"),
        ({"branches": 65}, "branches: must be at least 1 and at most 64, got 65"),
        ({"branches": 2**31 - 1}, "branches: must be"),
        ({"branches": 2, "resumed_output": b"1234"}, "branches: must be 1 with resumed_output"),
        ({"priority": 101}, "priority: must be at least -100 and at most 100, got 101"),
        ({"priority": -101}, "priority: must be"),
        ({"queue_timeout_ms": -1}, "queue_timeout_ms: must be at least 0 and at most 3600000, got -1"),
        ({"queue_timeout_ms": 2**63 - 1}, "queue_timeout_ms: must be"),
    ],
)
def test_what_a_request_may_not_ask_for_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    """Field and limit, before anything is computed (F64)."""
    with pytest.raises(InvalidRequestError, match=re.escape(problem)):
        codec.decode_generate(pb.GenerateRequest(text="a", **fields))


def test_absent_fields_mean_the_defaults() -> None:
    """A message with a prompt alone is complete."""
    decoded = codec.decode_generate(pb.GenerateRequest(text="a"))
    assert decoded == GenerateRequest(prompt=TextPrompt("a"))
    assert decoded.sampling == SamplingParams()


def test_explicit_zeros_are_not_defaults() -> None:
    """Temperature 0 is greedy and max_tokens 0 is no answer; top_p 0 is refused."""
    sampling = pb.Sampling(temperature=0, max_tokens=0, seed=0)
    decoded = codec.decode_generate(pb.GenerateRequest(text="a", sampling=sampling)).sampling
    assert (decoded.temperature, decoded.max_tokens, decoded.seed) == (0.0, 0, 0)
    with pytest.raises(InvalidRequestError, match=r"sampling\.top_p"):
        codec.decode_generate(pb.GenerateRequest(text="a", sampling=pb.Sampling(top_p=0)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": math.inf}, "sampling.top_p"),
        ({"min_p": -math.inf}, "sampling.min_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": -1}, "sampling.max_tokens"),
        ({"max_tokens": 2**31}, "sampling.max_tokens"),
        ({"max_tokens": -(2**63)}, "sampling.max_tokens"),
        ({"seed": -1}, "sampling.seed"),
        ({"stop": ["x"] * 1000}, "sampling.stop"),
        ({"stop": ["x" * 100_000]}, "sampling.stop"),
        ({"stop_token_ids": range(100_000)}, "sampling.stop_token_ids"),
        ({"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ({"repetition_penalty": 0}, "sampling.repetition_penalty"),
        ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
        ({"presence_penalty": -3}, "sampling.presence_penalty"),
        ({"logit_bias": dict.fromkeys(range(100_000), 1.0)}, "sampling.logit_bias"),
        ({"logit_bias": {1: math.nan}}, "sampling.logit_bias"),
        ({"logit_bias": {2**32 - 1: 1}}, "sampling.logit_bias"),
        ({"json_schema": "{" * 100_000}, "sampling.json_schema"),
        ({"json_schema": ""}, "sampling.json_schema"),
        ({"regex": "(" * 100_000}, "sampling.regex"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"min_tokens": -1}, "sampling.min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
    ],
)
def test_sampling_beyond_a_limit_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    """What a hostile message may hold ends in an error that names the field (F58, F64)."""
    with pytest.raises(InvalidRequestError) as caught:
        codec.decode_generate(pb.GenerateRequest(text="a", sampling=pb.Sampling(**fields)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt()), "tokens.ids"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=b"abc")), "tokens.ids"),
        (pb.GenerateRequest(text="a", resumed_output=b"abc"), "resumed_output"),
        (
            pb.GenerateRequest(
                chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(role="God")])
            ),
            "chat.messages[1].role",
        ),
        (
            pb.GenerateRequest(
                chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * (MAX_CHAT_MESSAGES + 1))
            ),
            "chat.messages",
        ),
    ],
)
def test_a_missing_or_wrong_prompt_is_refused_by_name(message: pb.GenerateRequest, field: str) -> None:
    """Missing, empty and malformed prompts each name what is wrong (F58)."""
    with pytest.raises(InvalidRequestError) as caught:
        codec.decode_generate(message)
    assert caught.value.field == field


def test_tokenize_takes_text_and_chat() -> None:
    """Tokenize refuses the same prompts that Generate refuses."""
    assert codec.decode_tokenize(pb.TokenizeRequest(text="a")) == TextPrompt("a")
    chat = codec.encode_chat((ChatMessage("user", "a"),))
    assert codec.decode_tokenize(pb.TokenizeRequest(chat=chat)) == ChatPrompt((ChatMessage("user", "a"),))
    with pytest.raises(InvalidRequestError, match="one of text or chat"):
        codec.decode_tokenize(pb.TokenizeRequest())


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompt=TextPrompt("\ud800")),
        GenerateRequest(prompt=TextPrompt("a"), extra_key="\ud800"),
        GenerateRequest(prompt=ChatPrompt((ChatMessage("user", "\ud800"),))),
    ],
)
def test_text_that_utf8_cannot_carry_is_refused_before_it_is_sent(request_: GenerateRequest) -> None:
    """A lone surrogate is the caller's error, not a crash of the encoder."""
    with pytest.raises(InvalidRequestError, match="surrogate"):
        codec.encode_generate(request_)


@pytest.mark.parametrize("stop", [["x"], ["x" * 100, "y" * 100, "z" * 100]])
def test_parameters_that_were_seen_before_are_read_and_refused_as_the_first_time(stop: list[str]) -> None:
    """Those that are remembered and those that are too long for it."""
    message = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=b"\1\0\0\0"), sampling=pb.Sampling(stop=stop, seed=3)
    )
    first = codec.decode_generate(message)
    assert codec.decode_generate(message) == first
    message.sampling.seed = 4
    assert codec.decode_generate(message).sampling == dataclasses.replace(first.sampling, seed=4)
    message.sampling.top_p = 7.0
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"sampling\.top_p"):
            codec.decode_generate(message)
