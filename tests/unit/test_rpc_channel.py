"""The settings of every hop, as the other end meets them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from prefixmesh.rpc.channel import (
    CLIENT_OPTIONS,
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    WORKER_OPTIONS,
    ChannelOptions,
)
from tests.support.servers import eventually
from tests.support.silent_proxy import SilentProxy, proxy_before

HASTE: Final = 30
"""How much shorter than in earnest the test's times are."""

EMPTY_SETTINGS: Final = b"\0\0\0\x04\0\0\0\0\0"
"""What an HTTP/2 server must say first (RFC 9113, 6.5)."""


async def test_a_peer_that_falls_silent_is_given_up_in_the_time_that_is_set() -> None:
    """A process that is stopped keeps its connections open, and its kernel acknowledges what it is sent: only the missing answer to a
    ping tells (F13). It is given up after interval and timeout, not after the minute that gRPC waits for a ping by default."""

    async def greet_and_fall_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EMPTY_SETTINGS)
        while await reader.read(2**16):
            pass
        writer.close()

    times = (KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS)
    hasty = [(name, value // HASTE if value in times else value) for name, value in CLIENT_OPTIONS]
    loop = asyncio.get_running_loop()
    async with await asyncio.start_server(greet_and_fall_silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=hasty) as channel:
            call: Any = channel.unary_unary("/any/Method")
            started = loop.time()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=20)
            waited_s = loop.time() - started
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert waited_s < 3 * sum(times) / HASTE / 1e3


PINGS: Final = 3
"""Keepalive times in which nothing is said; each brings a ping and its answer. gRPC's servers, left as they are, end a connection at the third ping that they think too many."""

HASTY_TIME_MS: Final = 100
SILENT: Final = "/any/Silent"


def hasty(options: ChannelOptions, timeout_ms: int) -> list[tuple[str, int]]:
    """The same settings, with intervals of pings shortened alike at both ends. A timeout that is not to pass stays long."""
    times = {"grpc.keepalive_timeout_ms": timeout_ms, "grpc.http2.ping_timeout_ms": timeout_ms}
    for name, value in options:
        if name in ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms"):
            times[name] = value * HASTY_TIME_MS // KEEPALIVE_TIME_MS
    return [(name, times.get(name, value)) for name, value in options]


@dataclass
class Hop:
    """A client and a server with this fleet's settings, and what stands between them."""

    channel: grpc.aio.Channel
    proxy: SilentProxy
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then the server says nothing."""

    begun: int = 0
    left: int = 0
    """Calls that the server saw begin, and those that it saw cut off."""

    def call(self) -> Any:
        silent: Any = self.channel.unary_stream(SILENT)
        return silent(b"", timeout=30)


@asynccontextmanager
async def hop(timeout_ms: int, *, client_pings: bool = True, server_pings: bool = True) -> AsyncIterator[Hop]:
    """Of two that ping at one pace, mostly one does: what it sends is a sign of life to the other. So each can be had alone."""

    def paced(options: ChannelOptions, *, pings: bool) -> list[tuple[str, int]]:
        times = {} if pings else {"grpc.keepalive_time_ms": KEEPALIVE_TIME_MS}
        return [(name, times.get(name, value)) for name, value in hasty(options, timeout_ms)]

    async def be_silent(request: bytes, context: Any) -> AsyncIterator[bytes]:
        between.begun += 1
        try:
            await between.go_on.wait()
        except asyncio.CancelledError:
            between.left += 1
            raise
        yield b"done"

    server = grpc.aio.server(options=paced(SERVER_OPTIONS, pings=server_pings))
    handlers: dict[str, Any] = {"Silent": grpc.unary_stream_rpc_method_handler(be_silent)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("any", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with proxy_before(f"127.0.0.1:{port}") as proxy:
            options = paced(CLIENT_OPTIONS, pings=client_pings)
            async with grpc.aio.insecure_channel(proxy.address, options=options) as channel:
                between = Hop(channel, proxy)
                yield between
    finally:
        await server.stop(None)


async def outlive_pings(between: Hop) -> None:
    pings = between.proxy.pings
    await eventually(lambda: between.proxy.pings >= pings + 2 * (PINGS + 1), timeout_s=60.0)


async def silent_stream_goes_on(between: Hop) -> None:
    call = between.call()
    await eventually(lambda: between.begun)
    await outlive_pings(between)
    between.go_on.set()
    assert await call.read() == b"done"
    assert await call.read() is grpc.aio.EOF
    await between.call().read()
    assert between.proxy.connections == 1


async def idle_connection_stays(between: Hop) -> None:
    between.go_on.set()
    await between.call().read()
    await outlive_pings(between)
    await between.call().read()
    assert between.proxy.connections == 1


@pytest.mark.slow
async def test_clients_pings_of_three_keepalive_times_are_borne_in_silence_and_in_idleness() -> None:
    """A long prefill says nothing: no GOAWAY, the same connection. gRPC's clients ping once a second at most, whatever they are told."""
    pinging = {"server_pings": False}
    async with (
        hop(KEEPALIVE_TIMEOUT_MS, **pinging) as one,
        hop(KEEPALIVE_TIMEOUT_MS, **pinging) as other,
    ):
        await asyncio.gather(silent_stream_goes_on(one), idle_connection_stays(other))


async def test_servers_pings_of_three_keepalive_times_are_borne_in_silence() -> None:
    async with hop(KEEPALIVE_TIMEOUT_MS, client_pings=False) as between:
        await silent_stream_goes_on(between)


async def test_peer_that_is_out_of_reach_is_noticed_at_both_ends() -> None:
    """The caller's stream ends in UNAVAILABLE, and the server's handler is told that nobody listens, so that its work ends too."""
    async with hop(2 * HASTY_TIME_MS) as between:
        call = between.call()
        await eventually(lambda: between.begun)
        between.proxy.stall()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: between.left == 1)


def test_what_one_end_sends_the_other_takes() -> None:
    """Sizes, and pings: a client's are rarer than what a server bears, also where one comes early."""
    for options in (CLIENT_OPTIONS, WORKER_OPTIONS, SERVER_OPTIONS):
        told = dict(options)
        assert told["grpc.max_send_message_length"] == told["grpc.max_receive_message_length"]
        assert told["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
        assert told["grpc.keepalive_permit_without_calls"] == 1
        assert 2 * dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] < told["grpc.keepalive_time_ms"]  # fmt: skip
