"""A state in a real Redis that is frozen, emptied, killed and replaced under the routers that use it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
import redis

from prefixmesh.errors import ConfigError, UnavailableError
from prefixmesh.router import state_redis
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.open_state import open_store
from prefixmesh.router.state_redis import RedisStore
from prefixmesh.router.worker_roster import WorkerRoster
from tests.support.redis_server import RedisServer

TIMEOUT_S = 60


@pytest.fixture
def server(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """An empty one, of which a router asks more often than it would what it was not told."""
    monkeypatch.setattr(state_redis, "POLL_S", 0.05)
    redis_server.empty()
    return redis_server


class Seen:
    """What a watch has shown of a store, and the end of waiting for it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.removed = 0
        self._news = asyncio.Event()

    async def follow(self, store: RedisStore) -> None:
        async with aclosing(store.watch("")) as changes:
            async for change in changes:
                if change.value is None:
                    self.values.pop(change.key, None)
                    self.removed += 1
                else:
                    self.values[change.key] = change.value
                self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not holds():
                self._news.clear()
                await self._news.wait()

        await asyncio.wait_for(wait(), TIMEOUT_S)


@asynccontextmanager
async def router(server: RedisServer) -> AsyncIterator[tuple[RedisStore, Seen]]:
    """A store as a router has it, followed for as long as it is open."""
    store, seen = RedisStore(server.url), Seen()
    following = asyncio.create_task(seen.follow(store))
    try:
        yield store, seen
    finally:
        await store.close()
        await asyncio.wait_for(following, TIMEOUT_S)


async def test_several_routers_see_each_others_writes(server: RedisServer) -> None:
    async with router(server) as (one, seen_by_one), router(server) as (two, seen_by_two):
        await one.put("workers/a", b"1")
        await seen_by_two.until(lambda: seen_by_two.values == {"workers/a": b"1"})
        await two.put("workers/b", b"2")
        await two.delete("workers/a")
        await seen_by_one.until(lambda: seen_by_one.values == {"workers/b": b"2"})


async def test_write_that_was_never_told_is_found(server: RedisServer) -> None:
    """Redis may lose a message and does not say so."""
    async with router(server) as (store, seen):
        await store.put("a", b"1")
        await seen.until(lambda: seen.values == {"a": b"1"})
        with redis.Redis(port=server.port) as client:
            number = client.incr(state_redis.VERSION)
            client.hset(state_redis.ENTRIES, "b", f"{number}:2")
        await seen.until(lambda: seen.values == {"a": b"1", "b": b"2"})


async def test_copy_of_redis_that_was_behind_is_believed(server: RedisServer) -> None:
    """It takes the place of one that is gone, perhaps behind one address, and numbers its writes on from what it has."""
    async with router(server) as (store, seen):
        first = await store.put("a", b"1")
        await store.put("b", b"2")
        await seen.until(lambda: len(seen.values) == 2)
        with redis.Redis(port=server.port) as client:
            client.hdel(state_redis.ENTRIES, "b")
            client.set(state_redis.VERSION, str(first))
        await seen.until(lambda: seen.values == {"a": b"1"})
        await store.put("c", b"3")
        await seen.until(lambda: seen.values == {"a": b"1", "c": b"3"})


@pytest.mark.parametrize("message", [b"hello", b"1:\xff"])
async def test_message_of_somebody_else_ends_nothing(server: RedisServer, message: bytes) -> None:
    async with router(server) as (store, seen):
        await store.put("a", b"1")
        await seen.until(lambda: len(seen.values) == 1)
        with redis.Redis(port=server.port) as client:
            client.publish(state_redis.CHANGES, message)
        await store.put("b", b"2")
        async with router(server) as (other, _):
            await other.put("c", b"3")
        await seen.until(lambda: len(seen.values) == 3)


async def test_entry_of_somebody_else_hides_no_other(server: RedisServer) -> None:
    async with router(server) as (store, seen):
        await store.put("a", b"1")
        with redis.Redis(port=server.port) as client:
            client.hset(state_redis.ENTRIES, "junk", "of nobody's")
            client.hset(state_redis.ENTRIES, b"\xff", "7:x")
            client.publish(state_redis.CHANGES, f"{int(client.incr(state_redis.VERSION))}:junk")
        await store.put("b", b"2")
        await seen.until(lambda: seen.values == {"a": b"1", "b": b"2"})
        assert await store.get("junk") is None
        assert [entry.key for entry in await store.entries("")] == ["a", "b"]
    async with router(server) as (_, seen):
        await seen.until(lambda: seen.values == {"a": b"1", "b": b"2"})


async def test_what_goes_before_watching_begins_is_told(server: RedisServer) -> None:
    """A router reads everything first, and follows then: what another removes in between would stay for it for ever."""
    store, other = RedisStore(server.url), RedisStore(server.url)
    for key in ("pins/a", "pins/b", "workers/c"):
        await other.put(key, b"")
    assert len(await store.entries("")) == 3
    for key in ("pins/a", "workers/c"):
        await other.delete(key)
    async with aclosing(store.watch("pins/")) as changes:
        told = [await asyncio.wait_for(anext(changes), TIMEOUT_S) for _ in range(2)]
    assert {(change.key, change.value) for change in told} == {("pins/a", None), ("pins/b", b"")}
    await store.close()
    await other.close()


async def test_watch_that_was_closed_is_told_nothing_more(server: RedisServer) -> None:
    store = RedisStore(server.url)
    await store.put("a", b"1")
    async with aclosing(store.watch("")) as changes:
        assert (await anext(changes)).key == "a"
        assert len(store._watchers) == 1
    assert not len(store._watchers)
    await store.close()


async def test_emptied_redis_is_filled_again(server: RedisServer) -> None:
    """By whoever follows it; nobody's watch shows that anything went."""
    async with router(server) as (one, seen_by_one), router(server) as (two, seen_by_two):
        await one.put("workers/a", b"1")
        before = await one.put("workers/b", b"2")
        await seen_by_two.until(lambda: len(seen_by_two.values) == 2)
        server.empty()
        await two.put("workers/c", b"3")
        for seen in (seen_by_one, seen_by_two):
            await seen.until(lambda seen=seen: len(seen.values) == 3)  # type: ignore[misc]
            assert seen.values == {"workers/a": b"1", "workers/b": b"2", "workers/c": b"3"}
            assert not seen.removed
        after = {entry.key: entry.version for entry in await one.entries("")}
        assert set(after) == {"workers/a", "workers/b", "workers/c"}
        assert before is not None
        assert min(after.values()) > before


async def test_killed_redis_comes_back_empty(server: RedisServer) -> None:
    """Calls fail meanwhile with a clear error, and everything is there again afterwards."""
    async with router(server) as (store, seen):
        await store.put("workers/a", b"1")
        await seen.until(lambda: len(seen.values) == 1)
        server.kill()
        try:
            with pytest.raises(UnavailableError, match="the state in Redis cannot be used"):
                await store.put("workers/b", b"2")
            assert seen.values == {"workers/a": b"1"}
        finally:
            server.start()
        async with router(server) as (other, seen_by_other):
            await seen_by_other.until(lambda: seen_by_other.values == {"workers/a": b"1"})
            await other.put("workers/b", b"2")
            await seen.until(lambda: len(seen.values) == 2)


@pytest.mark.slow
async def test_frozen_redis_is_an_error_in_time(server: RedisServer) -> None:
    """And what was written by others meanwhile is seen afterwards."""
    async with router(server) as (store, seen):
        await store.put("a", b"1")
        await seen.until(lambda: len(seen.values) == 1)
        with server.frozen(), pytest.raises(UnavailableError):
            await asyncio.wait_for(store.get("a"), TIMEOUT_S)
        with redis.Redis(port=server.port) as client:
            client.client_kill_filter(_type="pubsub")
        await store.put("b", b"2")
        await seen.until(lambda: len(seen.values) == 2)
        entry = await store.get("a")
        assert entry is not None
        assert entry.value == b"1"


async def test_watch_waits_for_a_redis_that_is_not_there_yet(server: RedisServer) -> None:
    server.kill()
    async with router(server) as (store, seen):
        with pytest.raises(UnavailableError):
            await store.entries("")
        server.start()
        with redis.Redis(port=server.port) as client:
            client.ping()
        other = RedisStore(server.url)
        await other.put("a", b"1")
        await other.close()
        await seen.until(lambda: seen.values == {"a": b"1"})


async def test_store_that_was_closed_before_redis_was_reached_ends(server: RedisServer) -> None:
    server.kill()
    try:
        async with router(server) as (_, seen):
            await asyncio.sleep(0)
        assert seen.values == {}
    finally:
        server.start()


class Pool:
    """The workers that a roster has followed."""

    def __init__(self) -> None:
        self.endpoints: set[str] = set()
        self.changed = asyncio.Event()

    def add(self, endpoint: Endpoint) -> bool:
        self.changed.set()
        is_new = str(endpoint) not in self.endpoints
        self.endpoints.add(str(endpoint))
        return is_new

    def remove(self, endpoint: Endpoint) -> bool:
        self.changed.set()
        self.endpoints.discard(str(endpoint))
        return True

    async def until(self, endpoints: set[str]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.endpoints != endpoints:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def roster(server: RedisServer, *given: str) -> AsyncIterator[tuple[WorkerRoster, Pool]]:
    store, pool = RedisStore(server.url), Pool()
    workers = WorkerRoster(pool, store)  # type: ignore[arg-type]
    await workers.start(given)
    try:
        yield workers, pool
    finally:
        await workers.close()
        await store.close()


async def test_worker_added_at_one_router_is_followed_by_all(server: RedisServer) -> None:
    """And is not when it was removed at another."""
    async with roster(server, "10.0.0.9:1") as (one, of_one), roster(server) as (two, of_two):
        assert await one.add("10.0.0.1:1")
        await of_two.until({"10.0.0.1:1"})
        assert await two.remove("10.0.0.1:1")
        await of_one.until({"10.0.0.9:1"})


async def test_router_that_starts_without_its_redis_serves_the_workers_it_was_given(
    server: RedisServer,
) -> None:
    """Those of the store join when it is there."""
    async with roster(server) as (workers, _):
        await workers.add("10.0.0.1:1")
        server.kill()
        async with roster(server, "10.0.0.2:1") as (_, pool):
            assert pool.endpoints == {"10.0.0.2:1"}
            server.start()
            await pool.until({"10.0.0.1:1", "10.0.0.2:1"})


@pytest.mark.parametrize("url", ["redis://", "redis://127.0.0.1:notaport/0"])
def test_url_that_names_no_redis_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="state"):
        open_store(url)
