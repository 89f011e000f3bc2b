"""One behaviour for every ``StateStore``: a keeper's own tests add nothing but a factory here."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.errors import BudgetError, InvalidRequestError
from prefixmesh.router import state_redis, state_table
from prefixmesh.router.open_state import open_store
from prefixmesh.router.state_lease import Lease, release_lease, renew_lease, take_lease
from prefixmesh.router.state_store import (
    ABSENT,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Change,
    Entry,
    StateStore,
)
from tests.support.redis_server import RedisServer


@pytest.fixture(params=["memory", "file", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StateStore]:
    urls = {"memory": "memory://", "file": f"file://{tmp_path}/state.json"}
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        server.empty()
        urls["redis"] = server.url
    opened = open_store(urls[request.param])
    yield opened
    await opened.close()


async def within(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, 10)


async def test_what_was_put_is_got(store: StateStore) -> None:
    """Any bytes, also none; the last write counts."""
    assert await store.get("a") is None
    first = await store.put("a", b"\x00\xff")
    assert await store.get("a") == Entry("a", b"\x00\xff", first or -1)
    second = await store.put("a", b"")
    assert await store.get("a") == Entry("a", b"", second or -1)
    assert first != second


async def test_entries_of_one_prefix_in_order(store: StateStore) -> None:
    """A prefix is of the whole key: ``workers/`` is not ``workers2/``."""
    for key in ("workers/b", "workers2/x", "pins/p", "workers/a"):
        await store.put(key, key.encode())
    assert [entry.key for entry in await store.entries("workers/")] == ["workers/a", "workers/b"]
    assert len(await store.entries("")) == 4
    assert await store.entries("none/") == []


async def test_write_that_expects_another_version_changes_nothing(store: StateStore) -> None:
    """Two who read the same version: the second to write is told so."""
    version = await store.put("a", b"1")
    assert version is not None
    assert await store.put("a", b"2", expect=version) is not None
    assert await store.put("a", b"3", expect=version) is None
    entry = await store.get("a")
    assert entry is not None
    assert entry.value == b"2"
    assert not await store.delete("a", expect=version)
    assert await store.delete("a", expect=entry.version)


async def test_absent_is_a_version_to_expect(store: StateStore) -> None:
    """So that of several who make a thing one does."""
    assert await store.put("a", b"1", expect=ABSENT) is not None
    assert await store.put("a", b"2", expect=ABSENT) is None
    assert await store.put("b", b"1", expect=7) is None
    assert not await store.delete("b", expect=ABSENT)


async def test_versions_never_repeat(store: StateStore) -> None:
    """Not even over a deletion: whoever read before it must not pass for one who read after."""
    before = await store.put("a", b"1")
    assert await store.delete("a")
    assert not await store.delete("a")
    after = await store.put("a", b"1")
    assert before != after
    assert await store.put("a", b"2", expect=before) is None


async def test_one_of_many_writers_at_once_wins(store: StateStore) -> None:
    """The others are told, none is lost without a word."""
    versions = await asyncio.gather(*(store.put("a", b"%d" % n, expect=ABSENT) for n in range(8)))
    assert sum(version is not None for version in versions) == 1
    entry = await store.get("a")
    assert entry is not None
    assert entry.value == b"%d" % next(n for n, version in enumerate(versions) if version is not None)


@pytest.mark.parametrize("key", ["", "k" * (MAX_KEY_BYTES + 1)])
async def test_bad_key_is_refused_by_name(store: StateStore, key: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"key: must be 1 to {MAX_KEY_BYTES} bytes"):
        await store.put(key, b"")
    assert await store.entries("") == []


async def test_large_value_is_refused_with_the_limit(store: StateStore) -> None:
    with pytest.raises(InvalidRequestError, match=f"value: must be at most {MAX_VALUE_BYTES} bytes"):
        await store.put("a", bytes(MAX_VALUE_BYTES + 1))


async def test_entries_are_bounded(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there can still be changed and removed."""
    for keeper in (state_table, state_redis):
        monkeypatch.setattr(keeper, "MAX_ENTRIES", 2)
    await store.put("a", b"")
    await store.put("b", b"")
    with pytest.raises(BudgetError):
        await store.put("c", b"")
    assert await store.put("a", b"new") is not None
    assert await store.delete("b")
    assert await store.put("c", b"") is not None


async def test_watch_begins_with_what_is_there(store: StateStore) -> None:
    """And misses nothing between that and the first change."""
    version = await store.put("workers/a", b"1")
    assert version is not None
    await store.put("pins/x", b"")
    async with aclosing(store.watch("workers/")) as changes:
        assert await within(anext(changes)) == Change("workers/a", b"1", version)
        await store.put("pins/y", b"")
        later = await store.put("workers/b", b"2")
        assert later is not None
        assert await within(anext(changes)) == Change("workers/b", b"2", later)
        await store.delete("workers/a")
        gone = await within(anext(changes))
        assert (gone.key, gone.value) == ("workers/a", None)
        assert gone.version > later


async def test_watch_wakes_who_waits(store: StateStore) -> None:
    async with aclosing(store.watch("")) as changes:
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await store.put("a", b"1")
        assert (await within(waiting)).value == b"1"


async def test_slow_reader_gets_the_last_of_each_key(store: StateStore) -> None:
    """However much was written meanwhile, it keeps one change a key."""
    await store.put("a", b"first")
    async with aclosing(store.watch("")) as changes:
        await within(anext(changes))
        for number in range(20):
            await store.put("a", b"%d" % number)
        await store.put("b", b"x")
        await store.delete("b")
        seen = [await within(anext(changes)) for _ in range(2)]
        assert [(change.key, change.value) for change in seen] == [("a", b"19"), ("b", None)]


async def test_closing_ends_watches(store: StateStore) -> None:
    """Those that wait, and those that begin later."""
    changes = store.watch("")
    waiting = asyncio.ensure_future(anext(changes, None))
    await asyncio.sleep(0)
    await store.close()
    assert await within(waiting) is None
    assert await within(anext(store.watch(""), None)) is None


async def test_lease_has_one_holder_until_it_ends(store: StateStore) -> None:
    """By the caller's clock; its owner may take it again at any time."""
    held = await take_lease(store, "leases/pins", "r1", ttl_s=10.0, now=100.0)
    assert held is not None
    assert (held.owner, held.expires_at) == ("r1", 110.0)
    assert await take_lease(store, "leases/pins", "r2", ttl_s=10.0, now=109.9) is None
    again = await take_lease(store, "leases/pins", "r1", ttl_s=10.0, now=105.0)
    assert again is not None
    assert again.expires_at == 115.0
    taken = await take_lease(store, "leases/pins", "r2", ttl_s=10.0, now=115.0)
    assert taken is not None
    assert await renew_lease(store, again, ttl_s=10.0, now=116.0) is None


async def test_lease_is_renewed_and_given_back(store: StateStore) -> None:
    """Who has lost it neither prolongs nor ends another's."""
    first = await take_lease(store, "l", "r1", ttl_s=1.0, now=0.0)
    assert first is not None
    renewed = await renew_lease(store, first, ttl_s=5.0, now=0.5)
    assert renewed == Lease("l", "r1", 5.5, renewed.version if renewed else -1)
    assert renewed is not None
    assert not await release_lease(store, first)
    assert await take_lease(store, "l", "r2", ttl_s=1.0, now=2.0) is None
    assert await release_lease(store, renewed)
    assert await take_lease(store, "l", "r2", ttl_s=1.0, now=2.0) is not None


async def test_lease_of_another_clock_or_of_nobody_is_free(store: StateStore) -> None:
    """A store that takes another's place has the time of its own machine; and somebody may have written there."""
    assert await take_lease(store, "l", "r1", ttl_s=5.0, now=1000.0) is not None
    assert await take_lease(store, "l", "r2", ttl_s=5.0, now=400.0) is not None
    await store.put("l", b"\xff no lease")
    assert await take_lease(store, "l", "r2", ttl_s=5.0, now=400.0) is not None


async def test_clock_is_the_keepers(store: StateStore) -> None:
    """One that goes on, in seconds since 1970."""
    first = await store.now()
    assert abs(first - time.time()) < 60
    assert await store.now() >= first
    assert store.is_shared == isinstance(store, state_redis.RedisStore)


async def test_of_several_who_find_a_lease_ended_one_gets_it(store: StateStore) -> None:
    taken = await asyncio.gather(
        *(take_lease(store, "l", f"r{n}", ttl_s=9.0, now=float(n)) for n in range(6))
    )
    assert sum(lease is not None for lease in taken) == 1
