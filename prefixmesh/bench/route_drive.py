"""The load of ``prefixmesh bench route``: so many requests, a few at a time, and what they cost the server."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import grpc.aio

from prefixmesh.bench.route_process import Measured
from prefixmesh.bench.route_servers import GENERATE, ROUTE
from prefixmesh.rpc.channel import open_channel

AT_A_TIME: Final = 8
"""Requests under way: a server that is never idle within a measurement, and no queue that grows."""

IDLE_S: Final = 0.5
"""How long it is watched what a server takes when nobody asks."""


class Cost(NamedTuple):
    """What so many requests cost a server."""

    cpu_us: float
    """Of its processor time, for one request; what it takes when nobody asks is taken off."""

    frames: float
    """That came back for one."""


async def route_cost(server: Measured, messages: Iterator[bytes], requests: int) -> Cost:
    """Ask for that many routes."""
    async with open_channel(server.address) as channel:
        ask: Any = channel.unary_unary(ROUTE)

        async def one(message: bytes) -> int:
            await ask(message)
            return 1

        return await _cost(server, one, list(islice(messages, requests)))


async def generate_cost(server: Measured, messages: Iterator[bytes], requests: int) -> Cost:
    """Ask for that many answers and read them to their ends."""
    async with open_channel(server.address) as channel:
        ask: Any = channel.unary_stream(GENERATE)

        async def one(message: bytes) -> int:
            frames = 0
            call = ask(message)
            while await call.read() is not grpc.aio.EOF:
                frames += 1
            return frames

        return await _cost(server, one, list(islice(messages, requests)))


async def _cost(server: Measured, one: Callable[[bytes], Awaitable[int]], messages: Sequence[bytes]) -> Cost:
    await one(messages[0])  # the connection
    idle_share = await _idle_share(server)
    left = iter(messages)
    frames = 0

    async def some() -> None:
        nonlocal frames
        for message in left:
            came = await one(message)
            frames += came

    began, cpu = time.monotonic(), server.cpu_s()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_A_TIME):
            tasks.create_task(some())
    took, used = time.monotonic() - began, server.cpu_s() - cpu
    return Cost((used - idle_share * took) / len(messages) * 1e6, frames / len(messages))


async def _idle_share(server: Measured) -> float:
    began, cpu = time.monotonic(), server.cpu_s()
    await asyncio.sleep(IDLE_S)
    return (server.cpu_s() - cpu) / (time.monotonic() - began)
