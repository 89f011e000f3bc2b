"""A simulated router's end of the store that is shared: the real mirror and the real lease, and around them what ``router.state_redis`` does about
Redis, by messages over a simulated network.

It reads everything, is told of writes, asks now and then for the newest number, and reads everything again when something was missed; where
the store was emptied, it puts back first what it knows. Nothing waits for it: whoever wants to know looks at the mirror.
"""

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.router.pins.acting_lease import RENEW_S, ActingLease
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.state_mirror import StateMirror
from prefixmesh.router.state_store import ABSENT, Change, Entry
from prefixmesh.sim.fault_script import STORE
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Stream
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_store import Reading, SimulatedStore, Told
from prefixmesh.sim.simulated_tasks import Reply, Task, pause

Value = TypeVar("Value")

CALL_TIMEOUT_S: Final = 2.0
POLL_S: Final = 1.0
LEAST_RETRY_S: Final = 0.1
MOST_RETRY_S: Final = 2.0
"""All as of ``router.state_redis``, which needs a package that a simulation does not."""

_BROKEN: Final = Told(ABSENT, "")
"""In the place of what a stream tells last: it has broken."""


class StoreCalls:
    """``StateStore`` but for its watch, by calls over the network; those of one router's life, or of an operator."""

    is_shared = True

    def __init__(
        self,
        store: SimulatedStore,
        caller: str,
        writer: str,
        on_written: Callable[[Change], object] = lambda _: None,
    ) -> None:
        """``caller`` is its end of the network, ``writer`` what the store's log calls it. ``on_written`` is told of its own writes."""
        self._store = store
        self._caller = caller
        self._writer = writer
        self._on_written = on_written

    async def get(self, key: str) -> Entry | None:
        """See ``StateStore``."""
        return await self.ask(lambda store: store.get(key))

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int | None:
        """See ``StateStore``."""
        return await self._change(key, value, expect)

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """See ``StateStore``."""
        return await self._change(key, None, expect) is not None

    async def now(self) -> float:
        """See ``StateStore``."""
        return await self.ask(lambda store: store.now)

    async def ask(self, do: Callable[[SimulatedStore], Value]) -> Value:
        """What the store answers. Raises UnavailableError where it does not within ``CALL_TIMEOUT_S``, or is not there."""
        store, reply = self._store, Reply[Value]()
        answer: Stream[Value] = open_call(
            store.network,
            self._caller,
            STORE,
            lambda stream: store.serve(stream, do),
            reply.give,
            lambda: reply.fail(UnavailableError("the store is not there")),
        )
        late = store.sim.call_later(
            CALL_TIMEOUT_S, reply.fail, UnavailableError("the store did not answer in time")
        )
        try:
            return await reply
        finally:
            late.cancel()
            answer.leave()

    async def _change(self, key: str, value: bytes | None, expect: int | None) -> int | None:
        number = await self.ask(lambda store: store.change(key, value, expect, self._writer))
        if number is not None:
            self._on_written(Change(key, value, number))
        return number


class _Inbox:
    """What one stream tells."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._unread: deque[Told] = deque()
        self._news = Reply[None]()

    def hear(self, told: Told) -> None:
        """It tells this."""
        self._unread.append(told)
        self._news.give(None)

    async def next(self, until_s: float) -> Told | None:
        """What it told next; None where nothing comes until then."""
        if not self._unread and self._sim.now < until_s:
            self._news = Reply()
            timer = self._sim.call_at(until_s, self._news.give, None)
            try:
                await self._news
            finally:
                timer.cancel()
        return self._unread.popleft() if self._unread else None


class SimulatedState:
    """Of one life of a router. It begins at once; ``end`` is the life's end."""

    def __init__(
        self, store: SimulatedStore, name: str, router_id: str, on_change: Callable[[Change], object]
    ) -> None:
        self.mirror = StateMirror()
        self.is_known = False
        """Whether all was read once."""

        self.known_at = math.inf
        """Since when."""

        self.calls = StoreCalls(store, name, router_id, self._apply)
        self._store = store
        self._name = name
        self._on_change = on_change
        clock = partial(_now, store)
        # The protocol's watch is what this class is in the place of.
        self.lease = ActingLease(
            self.calls,  # type: ignore[arg-type]
            StoreClock(self.calls, clock),  # type: ignore[arg-type]
            router_id,
            lambda: None,
            clock,
        )
        self._tasks = [Task(self._follow()), Task(self._keep_lease())]

    def end(self) -> None:
        """Ask nothing any more, and hold nothing: what was held ends by itself."""
        for task in self._tasks:
            task.cancel()

    async def _keep_lease(self) -> None:
        """As ``ActingLease`` does by itself where there is a loop."""
        while True:
            with suppress(PrefixmeshError):  # it lapses
                await self.lease.ask()
            await pause(self._store.sim, RENEW_S)

    async def _follow(self) -> None:
        retry_s = LEAST_RETRY_S
        while True:
            inbox = _Inbox(self._store.sim)
            stream = self._open(inbox)  # first, so that nothing falls between
            try:
                await self._read_all()
                retry_s = LEAST_RETRY_S
                await self._listen(inbox)
            except PrefixmeshError:
                await pause(self._store.sim, retry_s)
                retry_s = min(2 * retry_s, MOST_RETRY_S)
            finally:
                stream.leave()

    def _open(self, inbox: _Inbox) -> Stream[Told]:
        store = self._store
        return open_call(
            store.network,
            self._name,
            STORE,
            store.follow,
            inbox.hear,
            lambda: inbox.hear(_BROKEN),
            may_garble=lambda _: True,
        )

    async def _listen(self, inbox: _Inbox) -> None:
        """Until something was missed. Raises UnavailableError when the store cannot be asked."""
        sim, newest = self._store.sim, ABSENT
        ask_at = sim.now + POLL_S
        while True:
            told = await inbox.next(ask_at)
            if told is _BROKEN:
                raise UnavailableError("the store is not there")
            if told is not None and not await self._take_over(told):
                return
            if sim.now < ask_at:
                continue
            if self.mirror.told < newest:  # what was the newest a poll ago has never been told
                return
            identity, newest = await self.calls.ask(lambda store: store.newest())
            if self.mirror.is_lost(identity) or newest < self.mirror.told:
                return
            ask_at = sim.now + POLL_S

    async def _take_over(self, told: Told) -> bool:
        """False where a write before it was missed."""
        if not self.mirror.heard(told.version):
            return False
        entry = await self.calls.get(told.key)
        self._apply(Change(told.key, None, told.version) if entry is None else Change(*entry))
        return True

    async def _read_all(self) -> None:
        reading = await self._reading()
        if self.mirror.is_lost(reading.identity):
            for entry in self.mirror.entries(""):
                await self.calls.put(entry.key, entry.value, expect=ABSENT)
            reading = await self._reading()
        for change in self.mirror.replace(*reading):
            self._on_change(change)
        if not self.is_known:
            self.is_known, self.known_at = True, self._store.sim.now

    async def _reading(self) -> Reading:
        return await self.calls.ask(lambda store: store.reading())

    def _apply(self, change: Change) -> None:
        if self.mirror.apply(change):
            self._on_change(change)


def _now(store: SimulatedStore) -> float:
    return store.sim.now
