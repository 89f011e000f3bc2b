"""Finding the field that made a message unreadable."""

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.wire_check import find_invalid_utf8

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
