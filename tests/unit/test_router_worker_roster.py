"""A roster whose caller leaves while the store is still asked: who is followed is remembered, and who is not is not."""

import asyncio

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.state_memory import MemoryStore
from prefixmesh.router.worker_roster import WORKERS, WorkerRoster

WORKER = "10.0.0.1:1"


class Pool(set[str]):
    """The workers that are followed."""

    def add(self, endpoint: Endpoint) -> bool:  # type: ignore[override]
        is_new = endpoint not in self
        super().add(endpoint)
        return is_new

    def remove(self, endpoint: Endpoint) -> bool:  # type: ignore[override]
        self.discard(endpoint)
        return True


class SlowStore(MemoryStore):
    """A write waits until it is let go on, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: UnavailableError | None = None

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int | None:
        self.asked.set()
        try:
            await self.may_go_on.wait()
            if self.error is not None:
                raise self.error
            return await super().put(key, value, expect=expect)
        finally:
            self.ended.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_adding_is_ended_though_nobody_waits_for_it(*, fails: bool) -> None:
    store, pool = SlowStore(), Pool()
    store.error = UnavailableError("it is gone") if fails else None
    adding = asyncio.create_task(WorkerRoster(pool, store).add(WORKER))  # type: ignore[arg-type]
    await store.asked.wait()
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    store.may_go_on.set()
    await asyncio.wait_for(store.ended.wait(), 60)
    await asyncio.sleep(0)
    followed = set() if fails else {WORKER}
    assert (pool, {entry.key for entry in await store.entries("")}) == (
        followed,
        {WORKERS + address for address in followed},
    )
