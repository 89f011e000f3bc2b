"""From the adapter that a caller names to the content it means in this fleet now; asks the workers when nobody is known to have it.

A name that the fleet is to have and no worker that is ready has yet is no mistake of the caller's; one that is being taken back is none of ours.

Workers tell of their adapters at every ``Describe``, so what was loaded a moment ago is not known yet. An unknown name is therefore no
answer before the ready workers have been asked once more; however many callers make up names, they are asked at a bounded rate.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, Protocol

from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.served_model import shown_name, unknown_adapter

MIN_ROUND_INTERVAL_S: Final = 0.25
"""The workers are asked at most so often: four times the rate at which they are asked anyway."""


class FleetNames(Protocol):
    """What is wished for the whole fleet."""

    def is_removed(self, name: str) -> bool:
        """Whether workers are forgetting it."""
        ...

    def may_be_wished(self, name: str) -> bool:
        """Whether workers are to have it, as far as can be told."""
        ...

    def digest_of(self, name: str) -> str:
        """The content that they are to have under it; empty where that is not known."""
        ...


class AdapterFinder:
    """Finds adapters for one event loop. Call ``close`` when it is not used any more."""

    def __init__(
        self,
        registry: WorkerRegistry,
        ask_workers: Callable[[], Awaitable[None]],
        names: FleetNames | None = None,
    ) -> None:
        """``ask_workers`` has every ready worker tell who it is, and returns when the registry knows."""
        self._registry = registry
        self._ask_workers = ask_workers
        self._names = names
        self._next_round: asyncio.Task[None] | None = None
        """The asking that has not begun; whoever needs one waits for it."""

        self._pause: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def known(self, name: str) -> str | None:
        """The content that an adapter's name means as far as workers have told; None when nobody that is ready has it. O(workers)."""
        wished = "" if self._names is None else self._names.digest_of(name)
        return self._registry.adapter_digest(name, wished)

    async def find(self, name: str) -> str:
        """Content digest of the adapter called ``name``; empty for the base model, whose name is empty.

        Raises InvalidRequestError when no worker has it, and UnavailableError when only workers that are not ready had it, or all are yet
        to load it.
        """
        if not name:
            return ""
        if self._names is not None and self._names.is_removed(name):
            raise unknown_adapter(name)
        digest = self.known(name)
        if digest is None:
            await self.ask()
            digest = self.known(name)
        if digest is None:
            raise self._not_found(name)
        return digest

    async def ask(self) -> None:
        """Have the workers asked once more; returns when an asking that began after this call is over."""
        if self._next_round is None:
            self._next_round = self._begin(self._ask_after(self._pause))
        await asyncio.shield(self._next_round)  # others wait for it, too

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_after(self, pause: "asyncio.Task[None] | None") -> None:
        if pause is not None:
            await pause
        # From here on, whoever comes may know of something newer than what will be told now.
        self._next_round = None
        self._pause = self._begin(asyncio.sleep(MIN_ROUND_INTERVAL_S))
        await self._ask_workers()

    def _begin(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _not_found(self, name: str) -> PrefixmeshError:
        away = self._registry.away_with_adapter(name)
        if not away and self._names is not None and self._names.may_be_wished(name):
            return UnavailableError(f"no worker that is ready has loaded the adapter {shown_name(name)} yet")
        if not away:
            return unknown_adapter(name)
        return UnavailableError(f"no worker that has the adapter {shown_name(name)} is ready: {away}")
