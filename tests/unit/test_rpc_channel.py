"""The settings of every hop, as the other end meets them."""

import asyncio
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from prefixmesh.rpc.channel import CLIENT_OPTIONS, KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS

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
