"""A store in Redis, for several routers that share one state.

Every write is one script in Redis: it compares, counts, writes and tells all others, or does nothing. One hash holds the entries, so that
one command reads them all. Each router keeps a mirror of it (``state_mirror``), which is what its watches show: they lose nothing when
Redis is slow, stands still, or goes, and nothing on a request's path asks Redis.

Whoever follows is told of every write by Redis's own publishing, which may lose messages and never says so. So the numbers of the writes
must follow each other, and the newest number is asked for every ``POLL_S``: what was missed is noticed, and everything is read again.

A Redis that was emptied, or replaced by an empty one, is filled again by the routers that are there, each with what it knows, where nobody
was quicker. What the others deleted while a router could not hear of it may come back so; with a Redis that keeps its data it does not.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final

from prefixmesh.errors import BudgetError, ConfigError, UnavailableError
from prefixmesh.router.state_mirror import StateMirror
from prefixmesh.router.state_store import ABSENT, MAX_ENTRIES, Change, Entry, check_key, check_value
from prefixmesh.router.state_table import Watchers
from prefixmesh.state_url import without_password

try:
    import redis.asyncio as redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError as error:  # the extra `redis`
    raise ConfigError("a state in Redis needs the package redis: pip install 'prefixmesh[redis]'") from error

logger = logging.getLogger(__name__)

ENTRIES: Final = "prefixmesh:state"
VERSION: Final = "prefixmesh:version"
IDENTITY: Final = "prefixmesh:identity"
CHANGES: Final = "prefixmesh:changes"
"""A Redis is one fleet's; give another fleet another database or server."""

CALL_TIMEOUT_S: Final = 2.0
"""Of one command. Redis answers within milliseconds or is in trouble, and whoever waits is an operator."""

POLL_S: Final = 1.0
"""Between two questions for the newest number: a lost message is noticed after so long at the latest."""

LEAST_RETRY_S: Final = 0.1
MOST_RETRY_S: Final = 2.0
"""Between attempts to follow a Redis that cannot be reached: it is followed again within five seconds of its return."""

_TROUBLE: Final = (RedisError, OSError, TimeoutError)
"""What it means that Redis cannot be used."""

_FULL: Final = b"full"

_WRITE: Final = """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
local version = '0'
if entry then version = string.sub(entry, 1, string.find(entry, ':', 1, true) - 1) end
if ARGV[2] ~= '' and ARGV[2] ~= version then return false end
if ARGV[3] == 'delete' then
  if not entry then return false end
elseif not entry and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then
  return 'full'
end
redis.call('SET', KEYS[3], ARGV[6], 'NX')
if redis.call('EXISTS', KEYS[2]) == 0 then
  local time = redis.call('TIME')
  redis.call('SET', KEYS[2], time[1] .. string.format('%06d', tonumber(time[2])))
end
redis.call('INCR', KEYS[2])
local number = redis.call('GET', KEYS[2])
if ARGV[3] == 'delete' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], number .. ':' .. ARGV[4])
end
redis.call('PUBLISH', ARGV[7], number .. ':' .. ARGV[1])
return number
"""
"""KEYS: entries, version, identity. ARGV: key, expected version or nothing, put or delete, value, most entries, an identity for a new
store, channel. Gives the write's number; nothing where another version is there. Numbers begin at the clock, so that they do not repeat in a
store that was emptied; as text, for a number of Lua's is not exact there."""


class RedisStore:
    """``StateStore`` in Redis. One event loop owns it."""

    def __init__(self, url: str) -> None:
        """Connects when it is first needed. ConfigError for a URL that Redis does not know."""
        try:
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=CALL_TIMEOUT_S,
                socket_connect_timeout=CALL_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # whether to try again is for whoever asked
            )
        except ValueError:  # which may tell a part of the password
            raise ConfigError(f"state: {without_password(url)!r} is no URL of a Redis") from None
        self._write = self._redis.register_script(_WRITE)
        self._mirror = StateMirror()
        self._watchers = Watchers()
        self._known = asyncio.Event()
        """Set once everything was read."""

        self._told_before: set[str] = set()
        """Keys that ``entries`` has told before that: which of them have gone meanwhile nobody else will tell."""

        self._following: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"RedisStore({self._mirror!r})"

    async def get(self, key: str) -> Entry | None:
        """See ``StateStore``."""
        raw = await _asked(self._redis.hget(ENTRIES, key))
        return None if raw is None else _entry(key.encode(), raw)

    async def entries(self, prefix: str) -> list[Entry]:
        """See ``StateStore``."""
        found = _entries(await _asked(self._redis.hgetall(ENTRIES)))
        if not self._known.is_set():
            self._told_before.update(found)
        return sorted(entry for entry in found.values() if entry.key.startswith(prefix))

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int | None:
        """See ``StateStore``."""
        check_key(key)
        check_value(value)
        return await self._change(key, value, expect)

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """See ``StateStore``."""
        return await self._change(key, None, expect) is not None

    async def watch(self, prefix: str) -> AsyncGenerator[Change]:
        """See ``StateStore``. Begins once Redis could be reached; from then on it only pauses while Redis cannot be."""
        if self._following is None and not self._is_closed:
            self._following = asyncio.create_task(self._follow(), name="redis-state")
        await self._known.wait()
        async with aclosing(self._watchers.watch(prefix, self._present)) as changes:
            async for change in changes:
                yield change

    async def now(self) -> float:
        """See ``StateStore``. Redis's."""
        seconds, microseconds = await _asked(self._redis.time())
        return float(seconds) + 1e-6 * float(microseconds)

    @property
    def is_shared(self) -> bool:
        """See ``StateStore``."""
        return True

    async def close(self) -> None:
        """See ``StateStore``."""
        self._is_closed = True
        self._watchers.close()
        self._known.set()
        while self._following is not None and not self._following.done():
            self._following.cancel()  # which redis-py takes for the end of what it waits for, in some places
            await asyncio.wait({self._following}, timeout=LEAST_RETRY_S)
        with suppress(RedisError, OSError):
            await self._redis.aclose()

    def _present(self, prefix: str) -> list[Entry | Change]:
        entries = self._mirror.entries(prefix)
        gone = self._told_before - {entry.key for entry in entries}
        return [
            *entries,
            *(Change(key, None, self._mirror.told) for key in sorted(gone) if key.startswith(prefix)),
        ]

    async def _change(self, key: str, value: bytes | None, expect: int | None) -> int | None:
        number = await _asked(self._run(key, value, expect))
        if number == _FULL:
            raise BudgetError(f"the state holds {MAX_ENTRIES} entries, which is its limit")
        if number is None:
            return None
        self._take(Change(key, value, int(number)))
        return int(number)

    def _take(self, change: Change) -> None:
        if self._mirror.apply(change) and self._known.is_set():
            self._watchers.tell(change)

    async def _follow(self) -> None:
        """For as long as the store is open: read everything, then what is told, and from the beginning when something was missed."""
        retry_s, was_reached = LEAST_RETRY_S, True
        while not self._is_closed:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as told:
                    await told.subscribe(CHANGES)  # first, so that nothing falls between
                    await self._read_all()
                    if not was_reached:
                        logger.info("state_reached entries=%d", len(self._mirror))
                    retry_s, was_reached = LEAST_RETRY_S, True
                    await self._listen(told)
            except (
                *_TROUBLE,
                ValueError,
            ) as error:  # ValueError: what somebody else has written or said there
                if was_reached:
                    logger.warning("state_lost problem=%r", str(error) or type(error).__name__)
                was_reached = False
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, MOST_RETRY_S)

    async def _listen(self, told: Any) -> None:
        """Until something was missed. Raises RedisError when Redis cannot be asked."""
        loop = asyncio.get_running_loop()
        ask_at, newest = loop.time() + POLL_S, ABSENT
        while not self._is_closed:
            message = await told.get_message(timeout=max(ask_at - loop.time(), 0.0))
            if message is not None and not await self._hear(message["data"]):
                return
            if loop.time() < ask_at:
                continue
            if self._mirror.told < newest:  # what was the newest a poll ago has never been told
                return
            identity, version = await self._redis.mget(IDENTITY, VERSION)
            newest = int(version or ABSENT)
            # One that has less than it has told is a copy that was behind, in the place of the one that is gone.
            if self._mirror.is_lost(identity or b"") or newest < self._mirror.told:
                return
            ask_at = loop.time() + POLL_S

    async def _hear(self, message: bytes) -> bool:
        """Take over what a message tells; False where one before it was missed."""
        number, _, name = message.partition(b":")
        version, key = int(number), name.decode()
        if not self._mirror.heard(version):
            return False
        raw = await self._redis.hget(ENTRIES, key)
        # What is there is of this write, or of a later one that will be told too.
        entry = None if raw is None else _entry(name, raw)
        self._take(Change(key, None, version) if entry is None else Change(*entry))
        return True

    async def _read_all(self) -> None:
        """Believe what Redis holds; where it was emptied, put back first what is known."""
        identity, version, found = await self._reading()
        if self._mirror.is_lost(identity):
            await self._put_back()
            identity, version, found = await self._reading()
        changes = self._mirror.replace(identity, version, found)
        if self._known.is_set():
            for change in changes:
                self._watchers.tell(change)
        self._known.set()

    async def _put_back(self) -> None:
        entries = self._mirror.entries("")
        logger.warning("state_emptied entries_put_back=%d", len(entries))
        for entry in entries:
            await self._run(entry.key, entry.value, ABSENT)

    async def _run(self, key: str, value: bytes | None, expect: int | None) -> Any:
        """The script: the write's number, nothing, or ``_FULL``."""
        wanted = "" if expect is None else expect
        action = "delete" if value is None else "put"
        most, identity = MAX_ENTRIES, secrets.token_hex(8)
        args = [key, wanted, action, value or b"", most, identity, CHANGES]
        return await self._write(keys=[ENTRIES, VERSION, IDENTITY], args=args)

    async def _reading(self) -> tuple[bytes, int, dict[str, Entry]]:
        """Identity, newest number and all entries, of one moment."""
        async with self._redis.pipeline(transaction=True) as all_at_once:
            all_at_once.get(IDENTITY).get(VERSION).hgetall(ENTRIES)
            identity, version, found = await all_at_once.execute()
        return identity or b"", int(version or 0), _entries(found)


async def _asked(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except _TROUBLE as error:
        raise UnavailableError(
            f"the state in Redis cannot be used: {str(error) or type(error).__name__}"
        ) from error


def _entry(name: bytes, raw: bytes) -> Entry | None:
    """None for what no store of ours has written: the others are served all the same."""
    number, _, value = raw.partition(b":")
    try:
        return Entry(name.decode(), value, int(number))
    except ValueError:
        logger.warning("state_entry_ignored key=%r", name)
        return None


def _entries(found: Mapping[bytes, bytes]) -> dict[str, Entry]:
    read = (_entry(name, raw) for name, raw in found.items())
    return {entry.key: entry for entry in read if entry is not None}
