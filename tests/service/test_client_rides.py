"""The client over a real router and real fronts: answers go on past a dead worker and a router that was started anew, and nothing stays booked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from prefixmesh import fleet_secret
from prefixmesh.client import AsyncClient, AsyncStream
from prefixmesh.config import WorkerConfig
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.tokens import unpack
from prefixmesh.worker.server import WorkerServer
from tests.support.routed_worker import TEXT, scripted_model
from tests.support.scripted_engine import INFO, ScriptedEngine
from tests.support.servers import Worker, byte_text, eventually, running_worker

ANSWER = "an answer of many tokens, each of which is a byte"


@dataclass(kw_only=True)
class Fleet:
    """Two workers, whose engines hold their answers after five tokens, and a router that may be started anew."""

    secret: FleetSecret
    engines: list[ScriptedEngine]
    workers: list[Worker]
    router: RouterServer
    address: str

    @classmethod
    async def start(cls, stack: AsyncExitStack) -> "Fleet":
        secret = fleet_secret.generate()
        engines, workers = [], []
        for number in range(2):
            engine = ScriptedEngine(ANSWER)
            engine.hold_after_tokens = 5
            config = WorkerConfig(worker_id=f"worker-{number}")
            server = WorkerServer(config, secret, engine=engine, text=byte_text())
            engines.append(engine)
            workers.append(await stack.enter_async_context(running_worker(server, secret)))
        fleet = cls(secret=secret, engines=engines, workers=workers, router=None, address="")  # type: ignore[arg-type]
        await fleet.start_router()
        return fleet

    async def start_router(self) -> None:
        """At the port where the last one was."""
        port = int(self.address.rpartition(":")[2] or 0)
        addresses = tuple(worker.bound.address for worker in self.workers)
        config = RouterConfig(workers=addresses, model=INFO.model, port=port)
        self.router = RouterServer(config, self.secret, model=scripted_model())
        self.address = (await self.router.start()).address

    async def until_ready(self) -> None:
        await eventually(lambda: len(self.router.core.registry.ready) == len(self.workers))

    def running(self) -> int:
        """The worker that has the request."""
        return next(number for number, engine in enumerate(self.engines) if engine.running)

    def loads(self) -> list[int]:
        return [entry.load.in_flight for entry in self.router.core.registry]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        running = await Fleet.start(stack)
        await running.until_ready()
        try:
            yield running
        finally:
            await running.router.stop(0.0)


async def read_five(stream: AsyncStream) -> None:
    for _ in range(5):
        await anext(stream)


@pytest.mark.parametrize("way", ["engine", "front"])
async def test_a_direct_answer_goes_on_at_the_other_worker(fleet: Fleet, way: str) -> None:
    """With the tokens and the seed of the first; what was booked there is given back."""
    async with AsyncClient(fleet.address, direct=True) as client, client.stream(TEXT) as stream:
        await read_five(stream)
        dead = fleet.running()
        other = fleet.engines[1 - dead]
        other.release()
        if way == "engine":
            fleet.engines[dead].die()
        else:
            await fleet.workers[dead].server.stop(0.0)
        answer = await asyncio.wait_for(stream.collect(), 20)
        (command,) = other.submitted
        assert (answer.text, answer.interruptions, answer.completion_tokens) == (ANSWER, 1, len(ANSWER))
        assert bytes(unpack(command.resumed).tolist()) == ANSWER[:5].encode()
        assert command.sampling.seed == answer.started.seed
        assert answer.worker_id == f"worker-{dead}"
        # The dead one's ends with its life, which the router takes for over some seconds later.
        await eventually(lambda: fleet.loads()[1 - dead] == 0)


@pytest.mark.parametrize("branches", [1, 3])
async def test_an_answer_goes_on_through_a_router_that_was_started_anew(fleet: Fleet, branches: int) -> None:
    """The worker stops what nobody reads any more; the new router knows nothing of the request but what its caller brings along."""
    async with AsyncClient(fleet.address) as client, client.stream(TEXT, branches=branches) as stream:
        for _ in range(branches):
            await read_five(stream)
        await fleet.router.stop(0.0)
        for engine in fleet.engines:
            await engine.until(lambda engine=engine: not engine.running)  # type: ignore[misc]
            engine.release()
        await fleet.start_router()
        answer = await asyncio.wait_for(stream.collect(), 20)
        assert [branch.text for branch in answer.branches] == [ANSWER] * branches
        assert (answer.interruptions, answer.completion_tokens) == (1, branches * len(ANSWER))
        resumed = [command.resumed for engine in fleet.engines for command in engine.submitted[-branches:]]
        assert sum(bytes(unpack(one).tolist()) == ANSWER[:5].encode() for one in resumed) == branches
        await eventually(lambda: not any(fleet.loads()))
