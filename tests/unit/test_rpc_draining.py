"""A drain and its undoing, whatever comes between the two."""

import asyncio

from prefixmesh.rpc.draining import Drainer

LONG_S = 3600.0


class Calls:
    """A table in which one call runs."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_idle = asyncio.Event()

    def __len__(self) -> int:
        return int(not self.is_idle.is_set())

    @property
    def is_draining(self) -> bool:
        return self.reason is not None

    def drain(self, reason: str | None) -> None:
        self.reason = reason

    async def wait_idle(self, timeout_s: float) -> bool:
        return await self.is_idle.wait()


class Telling:
    """Telling of it takes as long as the test wants."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self) -> None:
        await self.may.wait()


async def passed() -> None:
    """Everything that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_drain_is_waited_for_though_the_last_ones_undoing_still_tells_of_itself() -> None:
    calls, tell = Calls(), Telling()
    drainer = Drainer(calls, "this server", tell)
    first = asyncio.create_task(drainer.drain(LONG_S))
    await passed()
    tell.may.clear()
    undoing = asyncio.create_task(drainer.undo())
    await passed()
    second = asyncio.create_task(drainer.drain(LONG_S))
    await passed()
    tell.may.set()
    assert (await undoing, await first) == (1, 1)
    await passed()
    assert drainer.is_draining
    assert not second.done()
    calls.is_idle.set()
    assert await second == 0


async def test_whoever_waits_for_a_drain_is_answered_though_its_undoing_is_broken_off() -> None:
    calls, tell = Calls(), Telling()
    drainer = Drainer(calls, "this server", tell)
    waiting = asyncio.create_task(drainer.drain(LONG_S))
    await passed()
    tell.may.clear()
    undoing = asyncio.create_task(drainer.undo())
    await passed()
    undoing.cancel()
    assert await asyncio.wait_for(waiting, 10.0) == 1
