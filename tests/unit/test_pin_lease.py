"""Who acts for the pins: one router at a time, whatever clocks say and however late answers are."""

import asyncio
import random

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.router.pins.acting_lease import LEASE, LEASE_S, ActingLease
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.state_memory import MemoryStore
from prefixmesh.router.state_store import Entry


class SharedStore(MemoryStore):
    """A store of several routers, with a clock of its own. It may be gone."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 5_000_000.0
        self.is_gone = False
        self.asking_s = self.answering_s = 0.0
        """What a question for the time takes to come here, and its answer to be there, by everybody's clock."""

        self.routers: list[Router] = []

    @property
    def is_shared(self) -> bool:
        return True

    async def now(self) -> float:
        self.pass_time(self.asking_s)
        told = self.time
        self.pass_time(self.answering_s)
        if self.is_gone:
            raise UnavailableError("it is gone")
        return told

    async def get(self, key: str) -> Entry | None:
        if self.is_gone:
            raise UnavailableError("it is gone")
        return await super().get(key)

    def pass_time(self, seconds: float) -> None:
        """For everybody."""
        self.time += seconds
        for router in self.routers:
            router.monotonic += seconds


class Router:
    """A router's part in it. ``monotonic`` begins anywhere."""

    def __init__(self, store: SharedStore, name: str, monotonic: float) -> None:
        self.monotonic = monotonic
        clock = StoreClock(store, lambda: self.monotonic)
        self.lease = ActingLease(store, clock, name, lambda: None, lambda: self.monotonic)
        self.clock = clock
        store.routers.append(self)


def acts(router: Router) -> bool:
    return router.lease.is_held


@pytest.fixture
def store() -> SharedStore:
    return SharedStore()


@pytest.fixture
def two(store: SharedStore) -> tuple[Router, Router]:
    """F30: their clocks are twenty minutes apart."""
    return Router(store, "r1", 600.0), Router(store, "r2", -600.0)


async def test_one_of_two_acts_and_the_other_takes_over_when_it_stops(
    store: SharedStore, two: tuple[Router, Router]
) -> None:
    first, second = two
    for _ in range(20):
        await first.lease.ask()
        await second.lease.ask()
        assert (acts(first), acts(second)) == (True, False)
        store.pass_time(LEASE_S / 5)
    store.pass_time(LEASE_S * 4 / 5)
    assert not acts(first)  # although it was not told so
    await second.lease.ask()
    assert acts(second)
    await first.lease.ask()
    assert not acts(first)


async def test_there_are_never_two(store: SharedStore, two: tuple[Router, Router]) -> None:
    """However late an answer is, on either way: another's may come at once."""
    rng, acted = random.Random(7), set[int]()
    for _ in range(500):
        store.asking_s, store.answering_s = (
            rng.choice((0.0, rng.uniform(0.0, 0.9 * LEASE_S))) for _ in range(2)
        )
        await rng.choice(two).lease.ask()
        assert sum(acts(router) for router in two) <= 1
        acted.update(number for number, router in enumerate(two) if acts(router))
        store.pass_time(rng.uniform(0.0, 0.3 * LEASE_S))
        assert sum(acts(router) for router in two) <= 1
    assert acted == {0, 1}


async def test_whoever_cannot_reach_the_store_stops_in_time(
    store: SharedStore, two: tuple[Router, Router]
) -> None:
    first, _ = two
    await first.lease.ask()
    store.is_gone = True
    store.pass_time(LEASE_S * 0.99)
    with pytest.raises(UnavailableError):
        await first.lease.ask()
    assert acts(first)
    store.pass_time(LEASE_S * 0.02)
    assert not acts(first)
    store.is_gone = False
    await first.lease.ask()
    assert acts(first)


async def test_emptied_store_makes_no_second_one(store: SharedStore, two: tuple[Router, Router]) -> None:
    """F28: whoever writes first has it, and the other one stops when it asks, by the end of its lease at the latest."""
    first, second = two
    await first.lease.ask()
    await store.delete(LEASE)
    await first.lease.ask()
    await second.lease.ask()
    assert (acts(first), acts(second)) == (True, False)


async def test_whoever_leaves_gives_it_back(store: SharedStore, two: tuple[Router, Router]) -> None:
    first, second = two
    told = asyncio.Event()
    first.lease._on_change = told.set
    first.lease.start()
    await asyncio.wait_for(told.wait(), 60)
    assert acts(first)
    await first.lease.close()
    assert not acts(first)
    await second.lease.ask()
    assert acts(second)


async def test_state_of_one_router_needs_no_lease() -> None:
    memory = MemoryStore()
    lease = ActingLease(memory, StoreClock(memory), "r1", lambda: None)
    held = [lease.is_held]
    await lease.ask()
    assert [*held, lease.is_held] == [False, True]
    assert not await memory.entries("")


async def test_time_goes_on_while_the_store_is_gone(store: SharedStore, two: tuple[Router, Router]) -> None:
    """Both reckon one time, although their clocks differ; nothing ends before it is known."""
    first, second = two
    assert first.clock.unix_ms == 0
    for router in two:
        await router.clock.ask()
    store.is_gone = True
    store.pass_time(7.0)
    assert first.clock.unix_ms == second.clock.unix_ms == 5_000_007_000
