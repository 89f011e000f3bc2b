"""What a cache held at one moment, read in parts while it goes on.

Exact or void: the parts together are the blocks of every tier when the snapshot was opened, at (epoch, sequence), unless a flush
comes between. Then it ends at once, for what it had still to tell is of a life that is over, and its reader opens another. What
changes meanwhile costs one copy of the shard in which it changes (``sharded_blocks``); a snapshot that is dropped costs nothing.
"""

from prefixmesh.cache.events import CacheSummary, SnapshotPart
from prefixmesh.cache.sharded_blocks import ShardReader
from prefixmesh.cache.tier import Tier


class Snapshot:
    """``next_part`` until it gives None; then ``void`` says whether to start over. Made by ``CachePublisher.open_snapshot``."""

    __slots__ = ("__weakref__", "_readers", "advanced", "closed", "summary", "void")

    def __init__(self, summary: CacheSummary, readers: list[ShardReader]) -> None:
        self.summary = summary
        """Epoch, sequence, counts and digests of the moment: what a view must have once it has loaded every part."""
        self._readers = readers
        self.closed = False
        """Whether there are no more parts: all read, closed, or void."""
        self.void = False
        """Whether it ended before its last part, by a flush or because its reader had stopped reading: start over."""
        self.advanced = True
        """Whether it was read from since the publisher last looked for an abandoned one."""

    def next_part(self, max_blocks: int) -> SnapshotPart | None:
        """Up to ``max_blocks`` (at least 1) more blocks, of one tier. O(max_blocks + shards).

        None after the last part, after ``close``, and once void. An empty cache has one part, which is empty and the last.
        """
        if self.closed:
            return None
        self.advanced = True
        tier = next((tier for tier in Tier if self._readers[tier].left), Tier.DEVICE)
        names = self._readers[tier].take(max_blocks)
        if not any(reader.left for reader in self._readers):
            self.close()
        return SnapshotPart(self.summary.epoch, self.summary.sequence, tier, names, self.closed)

    def close(self) -> None:
        """Read no more: nothing is copied for it from now on, and nothing held. May be called again. O(shards)."""
        self.closed = True
        for reader in self._readers:
            reader.close()

    def make_void(self) -> None:
        """End it before its last part; called by the publisher."""
        self.close()
        self.void = True

    def __repr__(self) -> str:
        state = "void" if self.void else "closed" if self.closed else "open"
        left = ", ".join(f"{tier.name.lower()}={self._readers[tier].left}" for tier in Tier)
        return f"Snapshot({state}, epoch={self.summary.epoch:016x}, sequence={self.summary.sequence}, left: {left})"
