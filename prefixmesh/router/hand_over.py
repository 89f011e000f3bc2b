"""A worker that leaves hands over what it holds: its pins are warmed elsewhere, and its hottest prefixes copied to others, within a time limit.

An operator's drain may ask for it: the worker is sent nothing new from then on, and is told to drain only afterwards. A worker that drains
by itself, because it was told to stop, is asked as well for as long as it is there; it answers reads while its last streams end.
Pins are the controller's business: a worker that leaves counts as a source for it, and no longer as a holder.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.public import key_fingerprints
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.ids import Incarnation, Namespace
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.hand_over_plan import Given, Leaving, Taker, share_out
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.workers import WorkerPool
from prefixmesh.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)

MAX_PREFIXES: Final = 64
"""Handed over at most: system prompts, and the talks that go on just now."""

MAX_TOKENS: Final = 262_144
"""Of all of them together: as much as fits one message with room to spare."""

AT_A_TIME: Final = 4
"""Copies under way: each takes a part of some MiB between two steps of the worker that leaves, whose streams go on meanwhile."""

LIST_S: Final = 5.0
"""For the worker that leaves to say what is hot there: it does so between two steps."""

SETTLED_S: Final = 1.0
"""Pins are taken for handed over once nothing of them was under way for so long: the controller looks four times a second."""

LOOK_S: Final = 0.25
"""Between two looks at the pins, and at who drains."""

BY_ITSELF_S: Final = 30.0
"""What a worker that drains by itself may take: as long as its streams have by default. It breaks off when the worker is gone."""


@dataclass(slots=True)
class HandedOver:
    """What became of it."""

    prefixes: int = 0
    """Handed over whole."""

    failed: int = 0
    tokens: int = 0
    pins_left: int = 0
    """That too few others hold at the end."""


class HandOvers:
    """Of one router. ``start`` it once, ``close`` it at the end."""

    def __init__(
        self,
        core: RouterCore,
        pool: WorkerPool,
        *,
        is_acting: Callable[[], bool],
        pins_left: Callable[[Endpoint], int],
    ) -> None:
        """``is_acting``: whether this router is the one that looks after the fleet; ``pins_left``: how many pins of a worker too few others
        hold as yet."""
        self._core = core
        self._pool = pool
        self._is_acting = is_acting
        self._pins_left = pins_left
        self._done: set[Incarnation] = set()
        """Lives that were handed over, or are not to be."""

        self._served: set[Incarnation] = set()
        """Lives that were ready once: one that has yet to begin has nothing to hand over."""

        self._running: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look out for workers that drain by themselves. Needs a running event loop."""
        self._watching = asyncio.create_task(self._watch(), name="hand-overs")

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [*self._running, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self, entry: WorkerEntry) -> None:
        """This life of a worker is about to drain: it is sent nothing more, and nothing of it is handed over but by ``run``. O(workers)."""
        self._core.fleet.set_leaving(entry.endpoint, leaving=True)
        lives = {one.load.incarnation for one in self._core.registry}
        self._done &= lives
        self._served &= lives
        self._done.add(entry.load.incarnation)

    def take_back(self, entry: WorkerEntry) -> None:
        """It stays after all, as far as this router is asked."""
        self._done.discard(entry.load.incarnation)
        self._core.fleet.set_leaving(entry.endpoint, leaving=False)

    async def run(self, entry: WorkerEntry, limit_s: float) -> HandedOver:
        """Send a worker nothing more, and hand over what it holds. Cancelled, it is sent requests again, unless it has drained by itself."""
        self.leave(entry)
        handed = HandedOver()
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(self._hand_over(entry, handed), self._until_pins_are_elsewhere(entry))
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.take_back(entry)
            raise
        handed.pins_left = self._pins_left(entry.endpoint)
        _log.info(
            "worker_handed_over worker=%s prefixes=%d tokens=%d failed=%d pins_left=%d",
            entry.name,
            handed.prefixes,
            handed.tokens,
            handed.failed,
            handed.pins_left,
        )
        return handed

    async def _watch(self) -> None:
        while True:
            for entry in self._core.registry:
                life = entry.load.incarnation
                if entry.ready:
                    self._served.add(life)
                    self._done.discard(life)
                elif entry.ends and life in self._served and life not in self._done and self._is_acting():
                    self._done.add(life)
                    task = asyncio.create_task(self._run_by_itself(entry))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
            await asyncio.sleep(LOOK_S)

    async def _run_by_itself(self, entry: WorkerEntry) -> None:
        await self.run(entry, BY_ITSELF_S)
        # It says itself that it takes nothing: should it take that back, nobody here stands against it.
        self._core.fleet.set_leaving(entry.endpoint, leaving=False)

    async def _until_pins_are_elsewhere(self, entry: WorkerEntry) -> None:
        quiet_s = 0.0
        while quiet_s < SETTLED_S:
            await asyncio.sleep(LOOK_S)
            quiet_s = 0.0 if self._pins_left(entry.endpoint) else quiet_s + LOOK_S

    async def _hand_over(self, entry: WorkerEntry, handed: HandedOver) -> None:
        """Copy the hottest prefixes to others. What cannot be is counted, and hinders nothing else."""
        try:
            hot = await self._hot_prefixes(entry)
        except PrefixmeshError as error:
            _log.warning("hand_over_failed worker=%s problem=%r", entry.name, str(error))
            return
        places = asyncio.Semaphore(AT_A_TIME)

        async def bring(given: Given) -> None:
            prefix = hot[given.number]
            async with places:
                try:
                    held = await self._warm(entry, prefix, given.endpoint)
                except PrefixmeshError as error:
                    _log.warning(
                        "hand_over_failed worker=%s to=%s problem=%r", entry.name, given.endpoint, str(error)
                    )
                    held = 0
            is_whole = held >= _size(prefix)
            handed.prefixes += is_whole
            handed.failed += not is_whole
            handed.tokens += held

        await asyncio.gather(*map(bring, self._plan(entry, hot)))

    async def _hot_prefixes(self, entry: WorkerEntry) -> Sequence[pb.Prefix]:
        request = pb.HotPrefixesRequest(max_prefixes=MAX_PREFIXES, max_tokens=MAX_TOKENS)

        async def call(stub: Any, settings: Any) -> pb.HotPrefixesResponse:
            answer: pb.HotPrefixesResponse = await stub.ListHotPrefixes(request, **settings)
            return answer

        answer = await self._control(entry.endpoint, call, LIST_S)
        return [one.prefix for one in answer.prefixes]

    def _plan(self, entry: WorkerEntry, hot: Sequence[pb.Prefix]) -> Sequence[Given]:
        layout = entry.facts.kv_layout if entry.facts else ""
        takers = [
            self._taker(one)
            for one in self._core.registry.ready
            if layout and one.facts is not None and one.facts.kv_layout == layout
        ]
        prefixes = [
            Leaving(number, _size(prefix), self._holders(prefix), prefix.adapter_digest)
            for number, prefix in enumerate(hot)
        ]
        return share_out(prefixes, takers)

    def _taker(self, entry: WorkerEntry) -> Taker:
        columns = self._core.fleet.columns
        return Taker(
            endpoint=entry.endpoint,
            work_ms=entry.load.work_ms,
            room_tokens=columns.room_now.item(entry.row),
            ms_per_token=columns.rates.linear.item(entry.row),
            adapters=[told.digest for told in entry.adapters.values()],
        )

    def _holders(self, prefix: pb.Prefix) -> Sequence[Endpoint]:
        """Who says that it holds all whole blocks of a prefix. O(blocks + workers)."""
        key = RadixKey(
            Namespace(prefix.namespace),
            prefix.token_ids,
            prefix.boundary_tokens,
            Namespace(prefix.tail_namespace),
        )
        names = key_fingerprints(key, self._core.fleet.block_size)
        falls = self._core.view.find_told(names).device if names else []
        whole = sum(fall.slots for fall in falls if fall.blocks == len(names))
        return [endpoint for endpoint, followed in self._core.view if whole >> followed.slot & 1]

    async def _warm(self, entry: WorkerEntry, prefix: pb.Prefix, to: Endpoint) -> int:
        """Tokens that the other one holds then."""
        source = pb.KvSource(
            address=entry.endpoint,
            incarnation=entry.load.incarnation,
            tokens=_size(prefix),
            boundary_tokens=prefix.boundary_tokens,
        )
        request = pb.WarmRequest(prefix=prefix, sources=[source], copy_only=True)

        async def call(stub: Any, settings: Any) -> pb.WarmResponse:
            answer: pb.WarmResponse = await stub.Warm(request, **settings)
            return answer

        held: int = (await self._control(to, call, BY_ITSELF_S)).held_tokens
        return held

    async def _control(self, endpoint: Endpoint, call: Any, timeout_s: float) -> Any:
        link = self._pool.find_link(endpoint)
        if link is None:
            raise UnavailableError(f"{endpoint} is no worker of this router any more")
        return await link.control(call, timeout_s)


def _size(prefix: pb.Prefix) -> int:
    return len(prefix.token_ids) // TOKEN_BYTES
