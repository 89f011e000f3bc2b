"""Entries with versions, and who waits for their changes: what the stores that keep everything in this process have in common.

``StateTable`` is plain data. ``Watchers`` hands changes to readers of one event loop; each reader keeps the last change of a key, so its
backlog is bounded by the number of keys.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from prefixmesh.errors import BudgetError
from prefixmesh.router.state_store import ABSENT, MAX_ENTRIES, Change, Entry, check_key, check_value


class StateTable:
    """Values by key. Versions count all writes, so none repeats, not even that of a key which was deleted in between."""

    def __init__(self, entries: Iterable[Entry] = (), version: int = ABSENT) -> None:
        """``version`` is that of the last write."""
        self._entries = {entry.key: entry for entry in entries}
        self.version = version

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"StateTable({len(self)} entries, version {self.version})"

    def copy(self) -> "StateTable":
        """One that can be changed apart. O(entries)."""
        return StateTable(self._entries.values(), self.version)

    def get(self, key: str) -> Entry | None:
        """The entry of a key. O(1)."""
        return self._entries.get(key)

    def entries(self, prefix: str) -> list[Entry]:
        """Entries of all keys that begin so, sorted. O(entries)."""
        return sorted(entry for key, entry in self._entries.items() if key.startswith(prefix))

    def put(self, key: str, value: bytes, expect: int | None) -> Change | None:
        """Write; None when the key has not the expected version. Raises as ``StateStore.put``. O(1)."""
        check_key(key)
        check_value(value)
        if not self._meets(key, expect):
            return None
        if key not in self._entries and len(self) >= MAX_ENTRIES:
            raise BudgetError(f"the state holds {MAX_ENTRIES} entries, which is its limit")
        self.version += 1
        self._entries[key] = Entry(key, value, self.version)
        return Change(key, value, self.version)

    def delete(self, key: str, expect: int | None) -> Change | None:
        """Remove; None when the key is not there, or not at the expected version. O(1)."""
        if key not in self._entries or not self._meets(key, expect):
            return None
        self.version += 1
        del self._entries[key]
        return Change(key, None, self.version)

    def _meets(self, key: str, expect: int | None) -> bool:
        entry = self._entries.get(key)
        return expect is None or expect == (ABSENT if entry is None else entry.version)


class Watchers:
    """The readers that wait for changes."""

    def __init__(self) -> None:
        self._backlogs: dict[asyncio.Event, tuple[str, dict[str, Change]]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._backlogs)

    def tell(self, change: Change) -> None:
        """Something has changed. O(readers)."""
        for event, (prefix, backlog) in self._backlogs.items():
            if change.key.startswith(prefix):
                backlog.pop(change.key, None)  # in the order in which they became so
                backlog[change.key] = change
                event.set()

    def close(self) -> None:
        """End every watch, now and later."""
        self._is_closed = True
        for event in self._backlogs:
            event.set()

    async def watch(
        self, prefix: str, present: Callable[[str], Iterable[Entry | Change]]
    ) -> AsyncGenerator[Change]:
        """What ``present`` tells is there, or has gone, when reading begins, and what changes from then on."""
        event = asyncio.Event()
        backlog = {entry.key: Change(*entry) for entry in present(prefix)}
        self._backlogs[event] = (prefix, backlog)
        try:
            while not self._is_closed:
                while backlog:
                    yield backlog.pop(next(iter(backlog)))
                event.clear()
                if not self._is_closed:
                    await event.wait()
        finally:
            del self._backlogs[event]
