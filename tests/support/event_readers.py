"""Two who follow a cache's events: one hears each as it is told and believes nothing, one reads the stream as a router does."""

from collections import Counter
from collections.abc import Sequence

from prefixmesh.cache.events import EventSink
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.snapshot import Snapshot
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.view import CacheView, ViewResult
from prefixmesh.ids import Fingerprint


class Listener(EventSink):
    """Keeps plain bags, checks that each event makes sense after all before it, and passes it on to a publisher."""

    def __init__(self, publisher: CachePublisher) -> None:
        self.publisher = publisher
        self.blocks: dict[Tier, Counter[Fingerprint]] = {tier: Counter() for tier in Tier}

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        assert fingerprints
        assert parent is None or parent in self.blocks[tier], "a block came before the one it continues"
        self.blocks[tier].update(fingerprints)
        self.publisher.stored(tier, parent, fingerprints)

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        assert fingerprints
        gone = Counter(fingerprints)
        assert gone <= self.blocks[tier], "a block went that was not there"
        self.blocks[tier] -= gone
        self.publisher.removed(tier, fingerprints)

    def cleared(self) -> None:
        for blocks in self.blocks.values():
            blocks.clear()
        self.publisher.cleared()


class Follower:
    """A view made from a snapshot that is read a little at a time, and from the events since; then kept up to date."""

    PART_BLOCKS = 3

    def __init__(self, publisher: CachePublisher) -> None:
        self._publisher = publisher
        self._view = CacheView()
        self._snapshot: Snapshot | None = None
        self.snapshots_voided = 0
        self.begin()

    def begin(self) -> None:
        """Start over, from what there is now."""
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = self._publisher.open_snapshot()

    def follow(self) -> dict[Tier, set[Fingerprint]] | None:
        """Read a part of the snapshot, or all events since the last call; the view, None while it is not complete."""
        if self._snapshot is not None:
            part = self._snapshot.next_part(self.PART_BLOCKS)
            if part is None:
                assert self._snapshot.void
                self.snapshots_voided += 1
                self.begin()
                return None
            if not self._view.load(part):
                return None
            self._snapshot = None
        if not self._catch_up():
            self.begin()
            return None
        self._view.check_invariants()
        assert self._view.agrees(self._publisher.summary())
        return {tier: set(self._view.blocks(tier)) for tier in Tier}

    def _catch_up(self) -> bool:
        """Apply what has happened since; False when the log does not reach back so far."""
        assert self._view.epoch is not None
        events = self._publisher.events_since(self._view.epoch, self._view.sequence)
        if events is None:
            return False
        assert all(self._view.apply(event) is ViewResult.APPLIED for event in events)
        return True
