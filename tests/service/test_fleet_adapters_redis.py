"""Adapters of a fleet with two routers on one state in a real Redis: whatever becomes of it, names go on to mean what they mean."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import UnavailableError
from prefixmesh.router import state_redis
from prefixmesh.router.pins import acting_lease
from tests.support.adapter_worker import (
    WAIT_S,
    AdapterWorker,
    digest_of,
    listed,
    put,
    remove,
    share_folders,
    until_held,
)
from tests.support.redis_server import RedisServer
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

pytestmark = pytest.mark.slow

PROMPT = list(range(100))


@pytest.fixture
def server(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """An empty one, of which a router asks more often than it would what it was not told."""
    monkeypatch.setattr(state_redis, "POLL_S", 0.05)
    monkeypatch.setattr(acting_lease, "RENEW_S", 0.3)
    redis_server.empty()
    return redis_server


@pytest.fixture
async def workers() -> AsyncIterator[list[AdapterWorker]]:
    secret = fleet_secret.generate()
    begun = [await AdapterWorker(secret, f"w{number}").start() for number in range(2)]
    share_folders(begun, {"a": "first weights", "b": "other weights"})
    yield begun
    for worker in begun:
        await worker.kill()


@asynccontextmanager
async def router_of(workers: list[AdapterWorker], server: RedisServer) -> AsyncIterator[Router]:
    addresses = tuple(worker.address for worker in workers)
    async with running_router(0, secret=workers[0].secret, workers=addresses, state=server.url) as router:
        await router.until_ready(len(workers))
        yield router


def loads(workers: list[AdapterWorker]) -> int:
    return sum(len(worker.loads) for worker in workers)


async def generate(router: Router) -> str:
    answer = await router.generate(token_request(PROMPT, adapter="clerk"))
    return answer.started.adapter_digest


async def test_both_routers_know_and_one_has_it_done(
    workers: list[AdapterWorker], server: RedisServer
) -> None:
    """What is put at either is loaded once; the one that is left goes on, and what is removed at one is unknown at the other."""
    async with router_of(workers, server) as second:
        async with router_of(workers, server) as first:
            await put(first)
            for router in (first, second):
                await until_held(router, 2)
                assert await generate(router) == digest_of("first weights")
            assert loads(workers) == 2
            await put(second, path="b")
            for router in (first, second):
                told = await until_held(router, 2)
                assert told.digest == digest_of("other weights")
            assert loads(workers) == 4
        await workers[1].restart()
        await until_held(second, 2)
        async with router_of(workers, server) as third:
            await until_held(third, 2)
            assert loads(workers) == 5
            assert await remove(third)

            async def is_gone() -> bool:
                return "clerk" not in await listed(second)

            await eventually(is_gone, WAIT_S)
            assert [worker.script.adapters for worker in workers] == [{}, {}]


async def test_names_outlive_what_becomes_of_redis(workers: list[AdapterWorker], server: RedisServer) -> None:
    """F28: frozen, emptied, killed and started anew: every request is answered, the wish is there again, and nothing is loaded twice."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(router_of(workers, server))
        await put(router)
        told = await until_held(router, 2)
        with server.frozen():
            assert await generate(router) == told.digest
            with pytest.raises(UnavailableError):
                await put(router, "poet")
            assert (await listed(router))["clerk"].held == 2
        server.empty()
        server.kill()
        assert await generate(router) == told.digest
        server.start()

        async def can_be_written() -> bool:
            try:
                await put(router, "poet")
            except UnavailableError:
                return False
            return True

        await eventually(can_be_written, WAIT_S)
        await until_held(router, 2, "poet")
        assert (await listed(router))["clerk"] == told
        assert loads(workers) == 4
        await eventually(
            lambda: server.holds("adapters/clerk"), WAIT_S
        )  # put back when it is looked at again
        await stack.aclose()
        async with router_of(workers, server) as next_router:
            again = await until_held(next_router, 2)
            assert (again.generation, again.digest) == (told.generation, told.digest)
            assert loads(workers) == 4
