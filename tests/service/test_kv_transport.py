"""KV asked of an address that says whatever it likes: what is no answer to what was asked is told as such, and nothing of it is taken."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.fleet_secret import generate
from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.worker.kv_copies.grpc_transport import GrpcTransport
from prefixmesh.worker.kv_copies.transport import CopiedPart, WantedKv
from tests.support.kv_copying import name_of

pytestmark = pytest.mark.asyncio(loop_scope="function")

LATER_NEWS = bytes([9 << 3, 1])
"""A field of a number that no message of this version has."""


def header(revision: str = "rev", digest: str = "lies") -> bytes:
    told = pb.KvHeader(model_revision=revision, layout=pb.KvLayout(digest=digest))
    return pb.ReadPrefixResponse(header=told).SerializeToString()


def part(start: int) -> bytes:
    told = pb.KvPart(start_tokens=start, tokens=2, kv=b"kv", checksum=5)
    return pb.ReadPrefixResponse(part=told).SerializeToString()


@asynccontextmanager
async def speaker(messages: Sequence[bytes]) -> AsyncIterator[KvSource]:
    """A server that answers every ``ReadPrefix`` with these bytes."""

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    handler = grpc.method_handlers_generic_handler(
        "prefixmesh.v1.WorkerControl", {"ReadPrefix": grpc.unary_stream_rpc_method_handler(answer)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield KvSource(address=f"127.0.0.1:{port}", incarnation=Incarnation(7), tokens=4)
    finally:
        await server.stop(None)


async def read(messages: Sequence[bytes]) -> list[CopiedPart]:
    transport = GrpcTransport(generate())
    wanted = WantedKv(name_of([1, 2, 3, 4]), 0, "rev", "lies")
    try:
        async with speaker(messages) as source, aclosing(transport.read(source, wanted)) as parts:
            return [one async for one in parts]
    finally:
        await transport.close()


async def test_parts_come_behind_a_header_and_news_of_later_versions_are_passed_over() -> None:
    parts = await read([header(), part(0), LATER_NEWS, part(2)])
    assert [one.start_tokens for one in parts] == [0, 2]
    assert parts[0] == CopiedPart(0, 2, b"kv", 5)


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("header", [part(0)]),
        ("header", [LATER_NEWS, part(0)]),
        ("header", [header(revision="other"), part(0)]),
        ("header", [header(digest="other"), part(0)]),
        ("header", [b"\xff no message"]),
        ("part", [header(), b"\xff no message"]),
    ],
)
async def test_what_is_no_answer_to_what_was_asked_is_told(field: str, messages: list[bytes]) -> None:
    """Parts that no header names may be another model's KV; and bytes that are no message come out of gRPC as None."""
    with pytest.raises(InvalidRequestError) as caught:
        await read(messages)
    assert caught.value.field == field
