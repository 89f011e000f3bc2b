"""Finding the field that made a message unreadable."""

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import MAX_CHAT_MESSAGES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from prefixmesh.rpc.wire_check import find_crowded, find_invalid_utf8

DESCRIPTOR: Final[Any] = pb.GenerateRequest.DESCRIPTOR
MARK = "MARK"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text=MARK), "text"),
        (pb.GenerateRequest(request_id="fine", extra_key=MARK), "extra_key"),
        (pb.GenerateRequest(text="fine", sampling=pb.Sampling(min_p=0.5, stop=["a", MARK])), "sampling.stop"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=MARK)])),
            "chat.messages.role",
        ),
    ],
)
def test_the_string_that_is_not_utf8_is_named(message: pb.GenerateRequest, field: str) -> None:
    """Top-level, repeated and nested strings are found behind numbers and well-formed neighbours."""
    data = message.SerializeToString()
    assert find_invalid_utf8(DESCRIPTOR, data) is None
    assert find_invalid_utf8(DESCRIPTOR, data.replace(MARK.encode(), b"\xc3\x28\xa0\xa1")) == field


def test_bytes_fields_and_unknown_fields_may_hold_anything() -> None:
    """Only strings must be text."""
    data = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=b"\xff\xfe\xfd\xfc")).SerializeToString()
    unknown = b"\xf2\x07\x02\xff\xff"
    assert find_invalid_utf8(DESCRIPTOR, data + unknown) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(data: bytes) -> None:
    """The walk ends on every input, with a field's path or with nothing."""
    found = find_invalid_utf8(DESCRIPTOR, data)
    assert found is None or found.split(".")[0] in DESCRIPTOR.fields_by_name


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (pb.ChatPrompt(messages=[pb.ChatMessage()] * 200_000), "chat.messages"),
        (pb.Sampling(stop=[""] * 200_000), "sampling.stop"),
        (pb.Sampling(logit_bias=dict.fromkeys(range(300_000), 1.0)), "sampling.logit_bias.key"),
        (pb.Sampling(stop_token_ids=[1] * 300_000), "sampling.stop_token_ids"),
    ],
)
def test_lists_beyond_all_use_are_found_before_they_are_parsed(
    data: pb.ChatPrompt | pb.Sampling, field: str
) -> None:
    """An entry takes two bytes on the wire and some eighty once it is parsed (F64)."""
    message = pb.GenerateRequest()
    getattr(message, field.split(".", maxsplit=1)[0]).CopyFrom(data)
    assert find_crowded(DESCRIPTOR, message.SerializeToString()) == field


@pytest.mark.parametrize(
    ("piece", "field"),
    [
        (b"\x22\x00", "chat"),  # one field again and again: the last counts, all are parsed
        (b"\x98\x06\x01", ""),  # fields that the message does not have
        (b"\x9b\x06\x9c\x06", ""),  # groups
        (b"\x30\x01", "sampling"),  # a number where a message belongs
    ],
)
def test_any_kind_of_field_counts(piece: bytes, field: str) -> None:
    """Whatever the parser would keep is counted."""
    assert find_crowded(DESCRIPTOR, piece * 300_000) == field


def test_every_request_within_the_limits_has_room() -> None:
    """The most that a good request may hold is not crowded, and neither is a long prompt."""
    sampling = pb.Sampling(
        temperature=1,
        top_k=1,
        top_p=1,
        min_p=1,
        max_tokens=1,
        seed=1,
        stop=["stop"] * MAX_STOP_STRINGS,
        stop_token_ids=[2**31 - 1] * MAX_STOP_TOKEN_IDS,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
    )
    messages = [pb.ChatMessage(role="assistant", content="word " * 50)] * MAX_CHAT_MESSAGES
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), sampling=sampling, extra_key="k")
    text = pb.GenerateRequest(text="a" * 10_000_000, sampling=sampling)
    ids = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=bytes(10_000_000)), sampling=sampling)
    for message in (chat, text, ids):
        assert find_crowded(DESCRIPTOR, message.SerializeToString()) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_counted(piece: bytes) -> None:
    """The walk ends on every input, whatever the bytes say about their lengths."""
    found = find_crowded(DESCRIPTOR, piece + bytes(300_000))
    assert found is None or found == "" or found.split(".")[0] in DESCRIPTOR.fields_by_name
