"""What a step did to the cache's blocks, noted as it happens and handed over at the step's end. Pure.

The engine's process does not spend its time on books: the cache's calls are noted here, packed once a step, and travel with the step's
events to the front, which numbers them, keeps the books and serves whoever reads (``cache_watchers``).
"""

from collections.abc import Sequence
from typing import Literal

from prefixmesh.cache.events import EventSink
from prefixmesh.cache.packed_names import pack_names
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.worker.messages import CacheChange

_Note = tuple[Literal["stored", "removed"], int, Fingerprint | None, Sequence[Fingerprint]]

_CLEARED = CacheChange("cleared")


class CacheRecorder(EventSink):
    """The sink of an engine's cache; ``take`` after each step. Bounded by what one step can change."""

    __slots__ = ("_is_cleared", "_notes")

    def __init__(self) -> None:
        self._is_cleared = False
        self._notes: list[_Note] = []

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        """Note that blocks came. O(1) for a tuple, which the cache gives."""
        self._notes.append(("stored", tier, parent, tuple(fingerprints)))

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        """Note that blocks went. O(fingerprints)."""
        self._notes.append(("removed", tier, None, tuple(fingerprints)))

    def cleared(self) -> None:
        """Note that all went; what was noted before does not matter any more. O(1)."""
        self._is_cleared = True
        self._notes = []

    def take(self) -> list[CacheChange]:
        """What was noted since the last time, in order. O(fingerprints), and O(1) when nothing was."""
        if not (self._notes or self._is_cleared):
            return []
        notes, self._notes = self._notes, []
        changes = [_CLEARED] if self._is_cleared else []
        self._is_cleared = False
        changes += [CacheChange(kind, tier, parent, pack_names(names)) for kind, tier, parent, names in notes]
        return changes

    def __repr__(self) -> str:
        return f"CacheRecorder({len(self._notes)} notes{' after a flush' if self._is_cleared else ''})"
