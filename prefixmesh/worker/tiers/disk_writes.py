"""What goes to the disk, in which order: prefixes that have just become complete on the host, whose copies there are held while they are read. Pure."""

from typing import Final

from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.transfers import HostRead, Transfers
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.tiers.disk_jobs import Disk, WriteDone

MAX_QUEUED_WRITES: Final = 1024
"""Nodes that wait for the disk. More only says that it cannot follow; what is dropped is written when its prefix is backed up further, or again."""

MAX_LOOKS: Final = 32
"""Queued nodes that are handed on at a time: each costs as much as its whole path is long, also where the disk has all of it, or takes no
more, and steps wait meanwhile."""


class DiskWrites:
    """First in, first out; each node once."""

    def __init__(self, transfers: Transfers, disk: Disk, max_queued: int = MAX_QUEUED_WRITES) -> None:
        self._transfers = transfers
        self._disk = disk
        self._max_queued = max_queued
        self._queue: dict[TreeNode, None] = {}
        self._under_way: dict[int, tuple[TreeNode, HostRead]] = {}
        self.dropped_tokens = 0
        """Not queued, because the queue was full: of the last part of each path; only rises."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_writing(self) -> bool:
        """Whether host pages are locked for the disk."""
        return bool(self._under_way)

    @property
    def may_go_on(self) -> bool:
        """Whether ``pump`` has anything to do. O(1)."""
        return bool(self._queue) and self._disk.has_room()

    def backed_up(self, node: TreeNode) -> None:
        """The host has the whole path to ``node``. O(1)."""
        if len(self._queue) >= self._max_queued and node not in self._queue:
            self.dropped_tokens += len(node.key) // TOKEN_BYTES
            return
        self._queue[node] = None

    def pump(self) -> None:
        """Hand on what the disk has room for. O(length of the path) for each of at most ``MAX_LOOKS`` nodes."""
        for _ in range(MAX_LOOKS):
            if not self.may_go_on:
                return
            node = next(iter(self._queue))
            del self._queue[node]
            read = self._transfers.begin_read(node)
            if read is None:
                continue  # the host has given it up, or part of it
            number = self._disk.write(read.key, read.host_pages)
            if number is None:
                self._transfers.end_read(read)
            else:
                self._under_way[number] = (node, read)

    def done(self, outcome: WriteDone) -> None:
        """A write has ended: its host pages are free to go. What part of its path did not have its turn follows."""
        node, read = self._under_way.pop(outcome.number)
        self._transfers.end_read(read)
        if outcome.size_tokens:
            self.backed_up(node)

    def flushed(self) -> None:
        """The cache is empty: what is being read is read to its end."""
        self._queue.clear()
