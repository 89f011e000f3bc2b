"""What each name of the store is to mean now, by its record and by what was found out and is not written down yet. Pure.

A generation that was put is *sought* until a worker has loaded it; until then the name keeps the version before it, where there is one.
"""

from collections.abc import Mapping
from typing import NamedTuple

from prefixmesh.router.adapters.orders import WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord, Version, found


class Wish(NamedTuple):
    """One name of the store; made by ``wish_of``."""

    record: AdapterRecord
    version: Version | None
    """What workers are to have now: the newest generation, or the one that is kept; None while nobody knows any."""

    is_sought: bool
    """Whether it is not known yet what the newest generation is."""

    is_removed: bool
    name: str
    digest: str
    """The version's; empty where there is none to be loaded."""

    pinned: bool
    """The version's. These are plain fields: they are looked at for each worker and name."""

    def is_lacking(self, seen: WorkerSeen) -> bool:
        """Whether a worker is to load the version. Of one that is kept only while another is sought, any content will do meanwhile. O(1)."""
        if not self.digest:
            return False
        if self.is_sought:
            return self.name not in seen.adapters
        return seen.adapters.get(self.name) != self.digest or (self.name in seen.pinned) != self.pinned


def wish_of(record: AdapterRecord, version: Version | None) -> Wish:
    """The wish that a record is, with this version to be had."""
    is_loaded = version is not None and not record.is_removed
    return Wish(
        record=record,
        version=version,
        is_sought=not record.is_removed and (version is None or version.generation != record.generation),
        is_removed=record.is_removed,
        name=record.name,
        digest=version.digest if version is not None and is_loaded else "",
        pinned=version is not None and version.spec.pinned,
    )


class Wishes:
    """All names. Not thread-safe."""

    def __init__(self) -> None:
        self._records: Mapping[str, AdapterRecord] = {}
        self._found: dict[str, AdapterRecord] = {}
        """As the store is to have them: with the digest that their generation was found to have."""

        self.by_name: Mapping[str, Wish] = {}
        """Another mapping whenever a wish is another. Not to be changed."""

        self.sought: tuple[str, ...] = ()
        """Names whose newest generation is sought, sorted."""

    def __len__(self) -> int:
        return len(self.by_name)

    def get(self, name: str) -> Wish | None:
        """What a name is to mean; None when it is none of the store's. O(1)."""
        return self.by_name.get(name)

    def found(self) -> list[AdapterRecord]:
        """What was found out, and the store does not know yet."""
        return list(self._found.values())

    def take_over(self, records: Mapping[str, AdapterRecord]) -> bool:
        """Go by these records from now on; False when they are the same ones as before. O(names), or O(1)."""
        if records is self._records:
            return False
        self._records = records
        self._found = {name: one for name, one in self._found.items() if _is_news(records.get(name), one)}
        self._make()
        return True

    def find(self, record: AdapterRecord, digest: str) -> None:
        """A record's generation was found to be this. O(names)."""
        self._found[record.name] = found(record, digest)
        self._make()

    def _make(self) -> None:
        """What has not changed stays the same object."""
        before, made = self.by_name, {}
        for name, record in self._records.items():
            version, wish = _version(self._found.get(name, record)), before.get(name)
            is_same = wish is not None and wish.record is record and wish.version == version
            made[name] = wish if wish is not None and is_same else wish_of(record, version)
        self.by_name = made
        self.sought = tuple(sorted(name for name, wish in self.by_name.items() if wish.is_sought))


def _version(record: AdapterRecord) -> Version | None:
    return Version(record.spec, record.generation, record.digest) if record.digest else record.kept


def _is_news(record: AdapterRecord | None, one: AdapterRecord) -> bool:
    """Whether the store is still to be told what was found: of this very generation, and none that another store counts alike."""
    return record is not None and found(record, one.digest) == one and not record.digest
