"""What a router believes a shared store holds: the last whole reading, and the changes told since. Pure.

The store counts its writes, and each tells its number and its key. So a number that is not the next one shows that something was missed,
and then everything is read again. A store also has an identity, made with its first write: another identity, or none where there was one,
is a store that was emptied, or another one in its place.

A router that writes applies its own change at once, before it is told of it like everybody else. Changes of one key are ordered by their
numbers, and what is older than what is known changes nothing.
"""

from collections.abc import Iterable, Mapping

from prefixmesh.router.state_store import ABSENT, MAX_ENTRIES, Change, Entry


class StateMirror:
    """Entries by key, as of some write, and perhaps some later ones of our own."""

    def __init__(self) -> None:
        self.identity = b""
        """Of the store that was read last; empty before anything was written to any."""

        self._entries: dict[str, Entry] = {}
        self._removed: dict[str, int] = {}
        """Keys that went since the last whole reading, and by which write: an older change must not bring them back. A whole reading is
        asked for before they are many."""

        self._read = ABSENT
        """The write up to which the last whole reading told: what is older than it and was not in it went before."""

        self.told = ABSENT
        """The last write that we were told of, all before it included."""

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"StateMirror({len(self)} entries, version {self.told})"

    def entries(self, prefix: str) -> list[Entry]:
        """Entries of all keys that begin so, sorted. O(entries)."""
        return sorted(entry for key, entry in self._entries.items() if key.startswith(prefix))

    def heard(self, version: int) -> bool:
        """We are told of a write; False when everything must be read again: one before it was missed, or too many keys went. O(1)."""
        if version > self.told + 1 or len(self._removed) > MAX_ENTRIES:
            return False
        self.told = max(self.told, version)
        return True

    def apply(self, change: Change) -> bool:
        """Take one change over; whether anything is different now. O(1)."""
        known = self._entries.get(change.key)
        newest = self._removed.get(change.key, self._read) if known is None else known.version
        if change.version <= newest:
            return False
        if change.value is None:
            self._entries.pop(change.key, None)
            self._removed[change.key] = change.version
            return known is not None
        self._removed.pop(change.key, None)
        self._entries[change.key] = Entry(change.key, change.value, change.version)
        return True

    def is_lost(self, identity: bytes) -> bool:
        """Whether the store with this identity is not the one that was known: emptied, or another in its place."""
        if self.identity:
            return identity != self.identity
        return not identity and bool(self._entries)  # written by ourselves, before anything was read

    def replace(self, identity: bytes, version: int, entries: Mapping[str, Entry]) -> Iterable[Change]:
        """Believe a whole reading, of the moment of write ``version``; returns what is different. O(entries)."""
        changes = [
            Change(*entry)
            for key, entry in entries.items()
            if (known := self._entries.get(key)) is None or known.version != entry.version
        ]
        changes += [Change(key, None, version) for key in self._entries if key not in entries]
        self.identity, self.told, self._read = identity, version, version
        self._entries = dict(entries)
        self._removed = {}
        return changes
