"""Which workers a router follows: those it was started with, and those that operators added, which the store remembers.

What the store says is followed for as long as the router lives, so that several routers with one store follow the same workers. No
request waits for it: while the store is out of reach, the workers stay as they are.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from prefixmesh.addresses import is_address
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.state_store import ABSENT, StateStore
from prefixmesh.router.workers import WorkerPool

_log = logging.getLogger(__name__)

WORKERS: Final = "workers/"
"""Keys are this and an address; the value is empty, so far."""

RETRY_S: Final = 1.0
"""Between attempts to follow a store that cannot be read."""


class WorkerRoster:
    """Keeps a pool's workers and the store's records together. ``start`` it once, ``close`` it at the end."""

    def __init__(self, pool: WorkerPool, store: StateStore) -> None:
        self._pool = pool
        self._store = store
        self._following: asyncio.Task[None] | None = None

    async def start(self, given: Iterable[str]) -> None:
        """Follow the workers at the addresses ``given``, and those of the store; while it cannot be reached, those that are given."""
        for address in given:
            self._pool.add(Endpoint(address))
        try:
            for entry in await self._store.entries(WORKERS):
                self._take_over(entry.key, is_there=True)
        except UnavailableError as error:
            _log.warning("state_not_read problem=%r", str(error))
        self._following = asyncio.create_task(self._follow(), name="worker-roster")

    async def add(self, address: str) -> bool:
        """Follow a worker from now on, and after a restart; False when it is followed already, and then nothing happens.

        Raises UnavailableError when it cannot be remembered, OverloadedError when there are too many; it is not followed then.
        """
        endpoint = Endpoint(address)
        if not self._pool.add(endpoint):
            return False
        # To the end also where the caller leaves: who is followed and who is remembered must not part.
        await asyncio.shield(asyncio.ensure_future(self._remember(endpoint)))
        _log.info("worker_added endpoint=%s", endpoint)
        return True

    async def remove(self, address: str) -> bool:
        """Follow a worker no more; its running streams end undisturbed. False when it was not known. One that is named on the command
        line comes back with a restart.

        Raises UnavailableError when the store cannot forget it: it would come back with a restart, and is followed on.
        """
        was_remembered = await self._store.delete(WORKERS + address)
        return self._pool.remove(Endpoint(address)) or was_remembered

    async def first_problem(self, address: str, patience_s: float) -> str:
        """Why a worker is not sent requests, once it has answered or could not be reached, or after ``patience_s``; empty when it is."""
        return await self._pool.first_problem(Endpoint(address), patience_s)

    async def close(self) -> None:
        """Follow the store no more. The workers are the pool's."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    async def _remember(self, endpoint: Endpoint) -> None:
        try:
            await self._store.put(WORKERS + endpoint, b"", expect=ABSENT)
        except PrefixmeshError:
            self._pool.remove(endpoint)
            raise

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(WORKERS)) as changes:
                    async for change in changes:
                        self._take_over(change.key, is_there=change.value is not None)
                return  # the store is closed
            except PrefixmeshError as error:
                _log.warning("state_not_followed problem=%r", str(error))
                await asyncio.sleep(RETRY_S)

    def _take_over(self, key: str, *, is_there: bool) -> None:
        address = key.removeprefix(WORKERS)
        if not is_address(address):
            _log.warning("state_entry_ignored key=%r", key)
        elif is_there:
            try:
                self._pool.add(Endpoint(address))
            except PrefixmeshError as error:  # too many: the others serve
                _log.warning("worker_not_added endpoint=%s problem=%r", address, str(error))
        else:
            self._pool.remove(Endpoint(address))
