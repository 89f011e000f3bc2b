"""What a caller passes is checked before anything is sent (F45, F58, F64)."""

import math
from typing import Any

import numpy as np
import pytest

from prefixmesh import tokens
from prefixmesh.client import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from prefixmesh.client.calls import build_abort, build_generate, build_tokenize
from prefixmesh.client.target import Target, make_target
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import SamplingParams
from prefixmesh.tokens import pack

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", pb.GenerateRequest(text="hello")),
        (TextPrompt("hello"), pb.GenerateRequest(text="hello")),
        ([USER], pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(**USER)]))),
        ((ChatMessage("user", "hi"),), pb.GenerateRequest(chat={"messages": [USER]})),
        (ChatPrompt((ChatMessage("user", "hi"),)), pb.GenerateRequest(chat={"messages": [USER]})),
        ([1, 2**32 - 1], pb.GenerateRequest(tokens=pb.TokenPrompt(ids=tokens.pack([1, 2**32 - 1])))),
        (np.array([1, 2]), pb.GenerateRequest(tokens=pb.TokenPrompt(ids=tokens.pack([1, 2])))),
        (TokenPrompt(b"\1\0\0\0"), pb.GenerateRequest(tokens=pb.TokenPrompt(ids=b"\1\0\0\0"))),
    ],
)
def test_every_form_of_prompt_becomes_its_message(prompt: Any, expected: pb.GenerateRequest) -> None:
    """Text, conversations in three forms, token ids in three."""
    message = build_generate(prompt)
    message.ClearField("sampling")
    assert message == expected


def test_options_left_out_are_the_defaults() -> None:
    """A call without options decodes to the default sampling at the server."""
    assert codec.decode_generate(build_generate("hi")).sampling == SamplingParams()


def test_options_arrive_as_given() -> None:
    """Each option reaches its own field; a single stop string is one string, not its characters."""
    request = codec.decode_generate(
        build_generate(
            "hi",
            temperature=0,
            top_k=np.int64(5),  # type: ignore[arg-type]
            top_p=0.5,
            min_p=0.25,
            max_tokens=0,
            seed=0,
            stop="END",
            stop_token_ids=[7],
            ignore_eos=True,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=-1,
            logit_bias={np.int64(9): -100},  # type: ignore[dict-item]
            min_tokens=0,
            logprobs=0,
            json_schema={"type": "integer"},
            resumed_output=np.array([3, 4]),  # type: ignore[arg-type]
            branches=1,
            priority=-5,
            queue_timeout_ms=250,
            model="m",
            adapter="a",
            extra_key="k",
            request_id="r",
        )
    )
    assert request.sampling == SamplingParams(
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        max_tokens=0,
        seed=0,
        stop=("END",),
        stop_token_ids=(7,),
        ignore_eos=True,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        logit_bias={9: -100.0},
        logprobs=0,
        json_schema='{"type": "integer"}',
    )
    assert (request.model, request.adapter, request.extra_key) == ("m", "a", "k")
    assert request.client_request_id == "r"
    assert (request.branches, request.priority, request.queue_timeout_ms) == (1, -5, 250)
    assert codec.decode_generate(build_generate("hi", branches=3)).branches == 3
    assert request.resumed_output == pack([3, 4])
    several = codec.decode_generate(build_generate("hi", branches=2, resumed_branches=[[3], ()]))
    assert (several.resumed_branches, several.resumed_output) == ((pack([3]), b""), b"")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "sampling.max_tokens"),
        ({"max_tokens": 2**31}, "sampling.max_tokens"),
        ({"max_tokens": 10**400}, "sampling.max_tokens"),
        ({"max_tokens": 1.5}, "sampling.max_tokens"),
        ({"max_tokens": "7"}, "sampling.max_tokens"),
        ({"top_k": 2**31}, "sampling.top_k"),
        ({"top_k": -(10**5000)}, "sampling.top_k"),
        ({"seed": 2**63}, "sampling.seed"),
        ({"seed": -1}, "sampling.seed"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"temperature": 10**400}, "sampling.temperature"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"top_p": 0}, "sampling.top_p"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"stop": [""]}, "sampling.stop"),
        ({"stop": ["x"] * 1000}, "sampling.stop"),
        ({"stop": "\ud800"}, "sampling.stop"),
        ({"stop": [5]}, "sampling.stop"),
        ({"stop_token_ids": [2**31]}, "sampling.stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "sampling.stop_token_ids"),
        ({"logit_bias": [1, 2]}, "sampling.logit_bias"),
        ({"logit_bias": {"a": 1}}, "sampling.logit_bias"),
        ({"logit_bias": {1: "much"}}, "sampling.logit_bias"),
        ({"logit_bias": {2**70: 1}}, "sampling.logit_bias"),
        ({"min_tokens": 3, "max_tokens": 2}, "sampling.min_tokens"),
        ({"repetition_penalty": "a"}, "sampling.repetition_penalty"),
        ({"json_schema": 5}, "sampling.json_schema"),
        ({"json_schema": {"a": object()}}, "sampling.json_schema"),
        ({"regex": 5}, "sampling.regex"),
        ({"regex": "a", "json_schema": "{}"}, "sampling.regex"),
        ({"resumed_output": [-1]}, "resumed_output"),
        ({"resumed_output": [2**32]}, "resumed_output"),
        ({"resumed_output": "abc"}, "resumed_output"),
        ({"resumed_branches": [[1], [2]]}, "resumed_branches"),
        ({"branches": 2, "resumed_branches": [[1], [2.5]]}, "resumed_branches[1]"),
        ({"resumed_output": [1], "resumed_branches": [[1]]}, "resumed_branches"),
        ({"branches": 0}, "branches"),
        ({"branches": 65}, "branches"),
        ({"branches": 2.0}, "branches"),
        ({"branches": 2, "resumed_output": [1]}, "branches"),
        ({"priority": 101}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"queue_timeout_ms": -1}, "queue_timeout_ms"),
        ({"queue_timeout_ms": 0.5}, "queue_timeout_ms"),
        ({"extra_key": "k" * 1025}, "extra_key"),
        ({"extra_key": "\udcff"}, "extra_key"),
        ({"request_id": "r" * 257}, "request_id"),
        ({"model": 5}, "model"),
        ({"adapter": None}, "adapter"),
    ],
)
def test_option_out_of_its_limits_names_its_field(options: Any, field: str) -> None:
    """Also what protobuf would refuse with an error of its own (F58, F64)."""
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("hi", **options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "text"),
        ("\ud800", "text"),
        (TextPrompt(""), "text"),
        ([], "chat.messages"),
        ([{"role": "robot", "content": "x"}], "chat.messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "chat.messages[0].role"),
        ([USER, {"role": "user"}], "chat.messages[1]"),
        ([USER | {"tenant": "other"}], "chat.messages[0]"),
        ([{"role": "user", "content": None}], "chat.messages[0].content"),
        ([USER, "x"], "chat.messages[1]"),
        ([USER] * 4097, "chat.messages"),
        ([1, -1], "tokens.ids"),
        ([1, 2**32], "tokens.ids"),
        ([1, "2"], "tokens.ids"),
        (TokenPrompt(b""), "tokens.ids"),
        (TokenPrompt(b"123"), "tokens.ids"),
        (None, "prompt"),
        (5, "prompt"),
        (b"bytes", "prompt"),
        (USER, "prompt"),
        ("x" * (64 * 2**20), "request"),
    ],
)
def test_prompt_that_cannot_be_sent_names_what_is_wrong(prompt: Any, field: str) -> None:
    """Empty, malformed and oversized prompts (F58, F62)."""
    with pytest.raises(InvalidRequestError) as caught:
        build_generate(prompt)
    assert caught.value.field == field


def test_unknown_option_is_a_type_error_that_names_it() -> None:
    """A misspelt option is a mistake in the calling program and is never ignored."""
    with pytest.raises(TypeError, match="max_token"):
        build_generate("hi", max_token=5)  # type: ignore[call-arg]


def test_tokenize_takes_text_and_chat_but_no_tokens() -> None:
    """Token ids have nothing left to be tokenised."""
    assert build_tokenize("hi", "").text == "hi"
    assert build_tokenize([USER], "m") == pb.TokenizeRequest(model="m", chat={"messages": [USER]})
    with pytest.raises(InvalidRequestError, match="tokens already"):
        build_tokenize([1, 2], "")


def test_abort_needs_an_id() -> None:
    """An empty id is refused before it is sent."""
    assert build_abort("req-1").request_id == "req-1"
    with pytest.raises(InvalidRequestError, match="request_id"):
        build_abort("")


@pytest.mark.parametrize("address", ["", "localhost", ":1", "h:", "h:0", "h:65536", "h:x", "::1:5", "h:1:2"])
def test_address_that_is_no_host_and_port_is_refused(address: str) -> None:
    """gRPC would take some of these for other things and fail much later."""
    with pytest.raises(InvalidRequestError, match="host:port"):
        make_target(address, None, None, None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "router.local:50051"])
def test_good_addresses_are_taken(address: str) -> None:
    """Names, IPv4 and bracketed IPv6."""
    assert make_target(address, None, None, None).address == address


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 1e12, "soon"])
def test_timeout_that_means_nothing_is_refused(timeout_s: Any) -> None:
    """For the client and for a single call alike."""
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        make_target("h:1", None, None, timeout_s)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        Target("h:1", (), None).timeout_s(timeout_s)


def test_call_takes_its_own_timeout_before_the_clients() -> None:
    """The client's is the default."""
    target = make_target("h:1", None, None, 5)
    assert target.timeout_s(None) == 5.0
    assert target.timeout_s(2) == 2.0


@pytest.mark.parametrize("key", ["", "a b", "pm-é", "pm-1\n"])
def test_api_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    """The message tells the rule and not the key (F74)."""
    with pytest.raises(InvalidRequestError) as caught:
        make_target("h:1", key, None, None)
    assert not key or key.strip() not in str(caught.value)


@pytest.mark.parametrize("tenant", ["", "a\nb", "café", " a", "t" * 129])
def test_tenant_that_no_header_can_carry_is_refused(tenant: str) -> None:
    """Empty, unprintable, beyond ASCII, padded, too long."""
    with pytest.raises(InvalidRequestError, match="tenant"):
        make_target("h:1", None, tenant, None)


def test_nothing_shows_the_api_key() -> None:
    """Neither repr nor str of what holds it (F74)."""
    target = make_target("h:1", "pm-secret", "acme", None)
    assert ("authorization", "Bearer pm-secret") in target.metadata
    assert ("x-prefixmesh-tenant", "acme") in target.metadata
    assert "secret" not in repr(target) + str(target)
