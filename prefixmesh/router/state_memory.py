"""A store that ends with its process: for tests, and for routers whose workers are all on their command line."""

import time
from collections.abc import AsyncGenerator

from prefixmesh.router.state_store import Change, Entry
from prefixmesh.router.state_table import StateTable, Watchers


class MemoryStore:
    """``StateStore`` in this process's memory. One event loop owns it."""

    def __init__(self) -> None:
        self._table = StateTable()
        self._watchers = Watchers()

    def __repr__(self) -> str:
        return f"MemoryStore({self._table!r})"

    async def get(self, key: str) -> Entry | None:
        """See ``StateStore``."""
        return self._table.get(key)

    async def entries(self, prefix: str) -> list[Entry]:
        """See ``StateStore``."""
        return self._table.entries(prefix)

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int | None:
        """See ``StateStore``."""
        change = self._table.put(key, value, expect)
        if change is None:
            return None
        self._watchers.tell(change)
        return change.version

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """See ``StateStore``."""
        change = self._table.delete(key, expect)
        if change is not None:
            self._watchers.tell(change)
        return change is not None

    def watch(self, prefix: str) -> AsyncGenerator[Change]:
        """See ``StateStore``."""
        return self._watchers.watch(prefix, self._table.entries)

    async def now(self) -> float:
        """See ``StateStore``. This machine's."""
        return time.time()

    @property
    def is_shared(self) -> bool:
        """See ``StateStore``."""
        return False

    async def close(self) -> None:
        """See ``StateStore``."""
        self._watchers.close()
