"""Two routers on one state in a real Redis: one acts for the pins, another takes over, and no request notices what becomes of Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import UnavailableError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router import state_redis
from prefixmesh.router.pins import acting_lease
from tests.service.test_router_pins import WAIT_S, get, listed, pin, put, remove, until_held
from tests.support.pinning_worker import PinningWorker
from tests.support.redis_server import RedisServer
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def server(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """An empty one, of which a router asks more often than it would what it was not told."""
    monkeypatch.setattr(state_redis, "POLL_S", 0.05)
    monkeypatch.setattr(acting_lease, "LEASE_S", 6.0)
    monkeypatch.setattr(acting_lease, "RENEW_S", 0.3)
    redis_server.empty()
    return redis_server


@dataclass
class Fleet:
    """Two workers, and as many routers as are begun."""

    secret: FleetSecret
    workers: list[PinningWorker]
    state: str

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        addresses = tuple(worker.address for worker in self.workers)
        async with running_router(0, secret=self.secret, workers=addresses, state=self.state) as router:
            await router.until_ready(len(self.workers))
            yield router

    @property
    def orders(self) -> int:
        """What workers were had to do."""
        return sum(len(worker.warmed) + len(worker.unpinned) for worker in self.workers)

    def held(self) -> int:
        return sum(len(worker.pins) for worker in self.workers)


@pytest.fixture
async def fleet(server: RedisServer) -> AsyncIterator[Fleet]:
    secret = fleet_secret.generate()
    workers = [PinningWorker(secret, f"w{number}") for number in range(2)]
    for worker in workers:
        await worker.start()
    yield Fleet(secret, workers, server.url)
    for worker in workers:
        await worker.kill()


async def acting(*routers: Router) -> list[bool]:
    return [(await listed(router)).acting for router in routers]


async def until_one_acts(*routers: Router) -> Router:
    async def one() -> bool:
        return sum(await acting(*routers)) == 1

    await eventually(one, WAIT_S)
    return routers[(await acting(*routers)).index(True)]


async def test_one_of_two_acts_and_both_know(fleet: Fleet) -> None:
    """What is put at either is held once, and told by both; when the one that acts ends, the other one goes on and warms nothing again."""
    async with AsyncExitStack() as second_stack, fleet.router() as first:
        second = await second_stack.enter_async_context(fleet.router())
        await until_one_acts(first, second)
        await put(second, pin("a"))
        await put(first, pin("b", [5, *range(100)]))
        for router in (first, second):
            for name in ("a", "b"):
                await until_held(router, 2, name)
        assert fleet.orders == 4
        leaver, heir = (second, first) if (await acting(second))[0] else (first, second)
        if leaver is second:
            await second_stack.aclose()
        else:
            await first.server.stop(0.0)
        await until_one_acts(heir)
        assert fleet.orders == 4
        fleet.workers[0].lose_pins()
        await eventually(lambda: fleet.held() == 4, WAIT_S)
        await remove(heir, "a")
        await eventually(lambda: fleet.held() == 2, WAIT_S)


async def test_router_that_is_killed_is_followed_within_the_lease(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives nothing back: its lease ends by itself."""

    async def is_not_told(store: object, lease: object) -> bool:
        return False

    async with AsyncExitStack() as killed_stack:
        killed = await killed_stack.enter_async_context(fleet.router())
        await until_one_acts(killed)
        await put(killed, pin())
        await until_held(killed, 2)
        async with fleet.router() as heir:
            assert await acting(killed, heir) == [True, False]
            with monkeypatch.context() as patched:
                patched.setattr(acting_lease, "release_lease", is_not_told)
                await killed_stack.aclose()
            assert await acting(heir) == [False]
            await until_one_acts(heir)
            await until_held(heir, 2)
    assert fleet.orders == 2


async def test_restart_of_a_router_leaves_pins_as_they_are(fleet: Fleet) -> None:
    async with fleet.router() as router:
        await put(router, pb.PinSpec(name="a", text="the quick brown fox jumps over the lazy dog"))
        await until_held(router, 2)
    async with fleet.router() as router:
        await until_one_acts(router)
        await until_held(router, 2)
        assert (await get(router)).spec.text.startswith("the quick")
    assert fleet.orders == 2


async def test_requests_and_pins_outlive_what_becomes_of_redis(fleet: Fleet, server: RedisServer) -> None:
    """F28: frozen, emptied, killed and started anew: every request is answered, every pin is there again, and nothing was warmed twice."""
    async with fleet.router() as router:
        await put(router, pin("a"))
        await until_held(router, 2)

        async def serves() -> None:
            async with asyncio.timeout(WAIT_S):
                answer = await router.generate(token_request([*range(200), 7]))
            assert answer.started.cached_tokens.device == 200

        with server.frozen():
            await serves()
            assert (await get(router)).held == 2
            with pytest.raises(UnavailableError):
                await put(router, pin("b"))
        server.empty()
        await serves()

        async def is_back() -> bool:
            try:
                return not (await put(router, pin("a"))).changed
            except UnavailableError:
                return False

        await eventually(is_back, WAIT_S)
        server.kill()
        await serves()
        with pytest.raises(UnavailableError):
            await remove(router)
        assert (await get(router)).held == 2
        server.start()
        await eventually(is_back, WAIT_S)
        await serves()
        await until_one_acts(router)
        assert (await get(router)).held == 2
    assert fleet.orders == 2
