"""Which adapters are wished, as the state's store remembers them.

Every router follows the store for as long as it lives, so that all of them know the same names. While the store is out of reach, they stay
as they are.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

from prefixmesh.errors import PrefixmeshError
from prefixmesh.router.adapters.records import ADAPTERS, AdapterRecord, decode, name_of
from prefixmesh.router.state_store import StateStore

_log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Between attempts to follow a store that cannot be read."""


class AdapterRoster:
    """Keeps the names of the store. ``start`` it once, ``close`` it at the end."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._on_change: Callable[[], None] = _nothing
        self._records: dict[str, AdapterRecord] = {}
        self._versions: dict[str, int] = {}
        self._unread: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self.is_read = False
        """Whether the store has been read: before that nothing says which names are not wished."""

    def __repr__(self) -> str:
        return f"AdapterRoster({len(self._records)} names)"

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        """By name, those that were removed among them; another mapping whenever one is another. Not to be changed."""
        return self._records

    def version(self, name: str) -> int:
        """Of a name's entry in the store."""
        return self._versions[name]

    def is_removed(self, name: str) -> bool:
        """Whether workers are forgetting it. O(1)."""
        record = self._records.get(name)
        return record is not None and record.is_removed

    def may_be_wished(self, name: str) -> bool:
        """Whether workers are to have it, as far as can be told: of a store that was not read yet, or is of a later version, all may be. O(1)."""
        record = self._records.get(name)
        return not self.is_read or name in self._unread or (record is not None and not record.is_removed)

    def digest_of(self, name: str) -> str:
        """The content that workers are to have under it, be it the version before while its newest is sought; empty where none is known. O(1)."""
        record = self._records.get(name)
        if record is None or record.is_removed:
            return ""
        return record.digest or (record.kept.digest if record.kept is not None else "")

    def start(self, on_change: Callable[[], None]) -> None:
        """Follow the store from now on, and call ``on_change`` whenever a record is another. Nobody waits for it."""
        self._on_change = on_change
        self._following = asyncio.create_task(self._follow(), name="adapter-roster")

    async def close(self) -> None:
        """Follow the store no more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    def take(self, record: AdapterRecord, version: int) -> None:
        """A name is this, as of a write of ours, unless something newer is known. O(names)."""
        if self._versions.get(record.name, -1) < version:
            self._enter(record, version)

    async def _follow(self) -> None:
        while True:
            try:
                # First as a whole: a watch does not tell when it has shown all that was there.
                for entry in await self._store.entries(ADAPTERS):
                    self._take_over(entry.key, entry.value, entry.version)
                self.is_read = True
                self._on_change()
                async with aclosing(self._store.watch(ADAPTERS)) as changes:
                    async for change in changes:
                        self._take_over(change.key, change.value, change.version)
                return  # the store is closed
            except PrefixmeshError as error:
                _log.warning("state_not_followed problem=%r", str(error))
                await asyncio.sleep(RETRY_S)

    def _take_over(self, key: str, value: bytes | None, version: int) -> None:
        """What the store says, which is in order: also where its numbers are lower than before, since it may be another store."""
        name = name_of(key)
        if name is None:
            _log.warning("state_entry_ignored key=%r", key)
        elif value is None:
            self._leave(name)
        elif self._versions.get(name) != version:
            try:
                record = decode(value)
                if record.name != name:
                    raise ValueError("it is of another name")
            except ValueError as error:
                _log.warning("adapter_not_read key=%r problem=%r", key, str(error))
                self._leave(name)
                self._unread.add(name)
            else:
                self._enter(record, version)

    def _enter(self, record: AdapterRecord, version: int) -> None:
        self._unread.discard(record.name)
        self._versions[record.name] = version
        self._records = {**self._records, record.name: record}
        self._on_change()

    def _leave(self, name: str) -> None:
        self._unread.discard(name)
        if self._versions.pop(name, None) is not None:
            self._records = {one: record for one, record in self._records.items() if one != name}
            self._on_change()


def _nothing() -> None:
    """Nobody wants to know yet."""
