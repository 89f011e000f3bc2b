"""Who waits to hear of a worker: of that one, and of its removal."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.workers import WorkerPool
from tests.support.servers import eventually
from tests.support.simulated_fleet import BLOCK, EXPECTED


@pytest.fixture
def silent() -> Iterator[list[Endpoint]]:
    """Two addresses that take connections and never say a word."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    yield [Endpoint(f"127.0.0.1:{one.getsockname()[1]}") for one in listening]
    for one in listening:
        one.close()


async def test_who_waits_for_a_worker_hears_of_its_removal_at_once(silent: list[Endpoint]) -> None:
    core = RouterCore(EXPECTED, PolicyConfig(), block_size=BLOCK, max_tree_blocks=1_000, draw=lambda: 1)
    pool = WorkerPool(core, FleetSecret(bytes(range(32))), "router", lambda: None)
    for endpoint in silent:
        pool.add(endpoint)
    waiting = [asyncio.create_task(pool.first_problem(endpoint, 60.0)) for endpoint in silent]
    await eventually(lambda: len(pool._awaited) == 2)
    pool.remove(silent[0])
    async with asyncio.timeout(20.0):
        assert await waiting[0] == "", "it is not known"
    await pool.close()
    async with asyncio.timeout(20.0):
        assert await waiting[1] == "", "nor is any other"
    assert not pool._awaited
