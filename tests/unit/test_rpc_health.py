"""What a server says of its health, and that no watcher of it holds anybody up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.health import HealthService
from prefixmesh.rpc.server import make_server

STATES = health_pb2.HealthCheckResponse
PATIENCE_S = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, DATA = 4, 1, 0
END_STREAM, END_HEADERS = 1, 4
NO_WINDOW = b"\x00\x04\x00\x00\x00\x00"
"""The setting SETTINGS_INITIAL_WINDOW_SIZE, of 0 bytes (RFC 9113, 6.5.2)."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name: bytes, value: bytes) -> bytes:
    """A literal that is not indexed (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


WATCH = b"".join(
    header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/grpc.health.v1.Health/Watch"),
        (b":authority", b"test"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)


class Watched(HealthService):
    """Says that somebody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.is_watched = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        self.is_watched.set()
        await super().Watch(request, context)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Watched, str]]:
    service, server = Watched(), make_server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def check(stub: Any, name: str = "") -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
    return int(answer.status)


async def test_watchers_are_told_the_state_and_each_change() -> None:
    async with serving() as (service, address), open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="later"), timeout=PATIENCE_S)
        assert (await call.read()).status == STATES.SERVING
        assert (await unknown.read()).status == STATES.SERVICE_UNKNOWN
        await service.set("later", STATES.SERVING)
        await service.set("", STATES.SERVING)
        await service.set("", STATES.NOT_SERVING)
        assert (await call.read()).status == STATES.NOT_SERVING
        assert (await unknown.read()).status == STATES.SERVING
        call.cancel()
        unknown.cancel()


async def test_a_service_that_is_not_here_is_not_found() -> None:
    async with serving() as (_, address), open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(health_pb2_grpc.HealthStub(channel), "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_server_that_leaves_serves_nothing_whatever_is_set_afterwards() -> None:
    async with serving() as (service, address), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await service.set("one", STATES.SERVING)
        await service.enter_graceful_shutdown()
        await service.set("one", STATES.SERVING)
        assert await check(stub) == await check(stub, "one") == STATES.NOT_SERVING


async def test_a_watcher_that_takes_nothing_holds_nobody_up() -> None:
    """It needs no credentials: anybody could keep a router from draining, and from ending."""
    async with serving() as (service, address), open_channel(address) as channel:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        stub = health_pb2_grpc.HealthStub(channel)
        with closing(writer):
            writer.write(PREFACE + frame(SETTINGS, 0, 0, NO_WINDOW))
            writer.write(frame(HEADERS, END_HEADERS, 1, WATCH) + frame(DATA, END_STREAM, 1, bytes(5)))
            async with asyncio.timeout(PATIENCE_S):
                await service.is_watched.wait()
                await service.set("", STATES.NOT_SERVING)
                assert await check(stub) == STATES.NOT_SERVING
                await service.enter_graceful_shutdown()
