"""Backups under way: which path each is for, how many device pages they lock, and how late they are. Pure; a record, the keeper decides."""

from collections.abc import Iterator
from typing import Final

from prefixmesh.cache.node import INDEX_BYTES, TreeNode
from prefixmesh.cache.transfers import Offload
from prefixmesh.errors import InvariantError

LATE_COPY_S: Final = 0.25
"""Pages that a copy will give free are waited for until it is so old; whoever needs pages then takes others'."""


class Backup:
    """One backup in flight."""

    __slots__ = ("began_at", "copy", "gives", "node", "number")

    def __init__(self, number: int, node: TreeNode, copy: Offload, now: float, gives: int = 0) -> None:
        self.number = number
        self.node = node
        self.copy = copy
        self.began_at = now
        self.gives = gives
        """Of a rescue: device pages that are free when it has come."""

    @property
    def pages(self) -> int:
        """How many are copied."""
        return len(self.copy.device_pages)


class BackupsInFlight:
    """By their jobs' numbers, and by where they end."""

    def __init__(self) -> None:
        self._by_number: dict[int, Backup] = {}
        self._by_node: dict[TreeNode, Backup] = {}
        self.pages = 0
        """That are being copied."""

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Backup]:
        return iter(self._by_number.values())

    def add(self, backup: Backup) -> None:
        """One begins. O(1)."""
        self._by_number[backup.number] = self._by_node[backup.node] = backup
        self.pages += backup.pages

    def pop(self, number: int) -> Backup | None:
        """One has ended; None when it is none of these. O(1)."""
        backup = self._by_number.pop(number, None)
        if backup is not None:
            del self._by_node[backup.node]
            self.pages -= backup.pages
        return backup

    def covers(self, node: TreeNode) -> bool:
        """Whether part of what the host lacks of the path to ``node`` is being copied. O(depth)."""
        at: TreeNode | None = node
        while at is not None and not at.host_pages:
            if at in self._by_node:
                return True
            at = at.parent
        return False

    def is_late(self, now: float, after_s: float = LATE_COPY_S) -> bool:
        """Whether any has been under way for so long. O(backups)."""
        return any(now - backup.began_at >= after_s for backup in self)

    def pages_coming(self, now: float) -> int:
        """Device pages that nothing but one of those locks that are not late. O(backups * depth)."""
        coming = 0
        for backup in self:
            at: TreeNode | None = backup.node
            if now - backup.began_at >= LATE_COPY_S:
                continue
            # Whoever holds part of a path holds all before that part.
            while at is not None and at.parent is not None and at.lock_ref == 1:
                coming += len(at.pages) // INDEX_BYTES
                at = at.parent
        return coming

    def pages_given(self, now: float) -> int:
        """Device pages that come free by themselves with those that are not late. O(backups)."""
        return sum(backup.gives for backup in self if now - backup.began_at < LATE_COPY_S)

    def check_invariants(self) -> None:
        """The sum of pages; raises InvariantError. O(backups)."""
        pages = sum(backup.pages for backup in self)
        if pages != self.pages or len(self._by_node) != len(self._by_number):
            raise InvariantError(f"BackupsInFlight: {pages} pages are copied, {self.pages} are counted")
