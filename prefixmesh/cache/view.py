"""The other end of a publisher's stream: a copy of a cache's blocks, made from snapshot parts and events, that proves itself.

Sets only: what is on which tier. The order of a stream is relied on; loss, repetition and a new life of the cache are seen. Count
and digest are reckoned from what the stream says, not from the sets, so that a summary of the publisher's at the same epoch and
sequence proves both: that the stream was whole, and that the sets are those of the cache.
"""

import enum
from collections.abc import Set as AbstractSet

from prefixmesh.cache.events import CacheSummary, Cleared, Event, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Epoch, Fingerprint

Blocks = tuple[set[Fingerprint], ...]
"""A set per tier, in the order of ``Tier``."""


class ViewResult(enum.Enum):
    """What became of an event; the view has changed only when it was applied."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """It is counted in already: go on."""
    GAP = "gap"
    """There are events between the last one and this: ask for those, or for a snapshot."""
    OTHER_EPOCH = "other epoch"
    """It is of a life of the cache that this view has not seen begin: ask for a snapshot."""


class CacheView:
    """A cache's blocks per tier as the stream tells them; empty and of no epoch until it has a snapshot or a ``Cleared``.

    Change: ``apply`` an event, ``load`` a snapshot's part. Read: ``blocks``, ``state``, ``agrees``.
    """

    __slots__ = ("_blocks", "_loaded", "_loading", "_states", "epoch", "sequence")

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        """None before the first snapshot or ``Cleared``."""
        self.sequence = 0
        """Of the last event counted in."""
        self._blocks: Blocks = _no_blocks()
        self._states = [_state_of(blocks) for blocks in self._blocks]
        self._loading: tuple[Epoch, int] | None = None
        self._loaded: Blocks = ()

    def apply(self, event: Event) -> ViewResult:
        """Count the next event in. O(its fingerprints). A snapshot that is half loaded may go on, whatever is applied meanwhile."""
        if isinstance(event, Cleared):
            if event.epoch == self.epoch:
                return ViewResult.DUPLICATE
            self._begin(event.epoch, event.sequence, _no_blocks())
            return ViewResult.APPLIED
        if event.epoch != self.epoch:
            return ViewResult.OTHER_EPOCH
        if event.sequence != self.sequence + 1:
            return ViewResult.DUPLICATE if event.sequence <= self.sequence else ViewResult.GAP
        self._change(event)
        self.sequence = event.sequence
        return ViewResult.APPLIED

    def load(self, part: SnapshotPart) -> bool:
        """Take a part in; True when it was the last and the view is now the snapshot. O(its fingerprints).

        Nothing of it shows before: a half-loaded snapshot leaves the view as it is. A part of another snapshot than the one being
        loaded begins anew.
        """
        if self._loading != (part.epoch, part.sequence):
            self._loading, self._loaded = (part.epoch, part.sequence), _no_blocks()
        self._loaded[part.tier].update(part.fingerprints)
        if part.last:
            self._begin(part.epoch, part.sequence, self._loaded)
            self._loading, self._loaded = None, ()
        return part.last

    def blocks(self, tier: Tier) -> AbstractSet[Fingerprint]:
        """The fingerprints on the tier: the view's own set, to be read only. O(1)."""
        return self._blocks[tier]

    def state(self, tier: Tier) -> TierState:
        """Count and digest as the stream has told them. O(1)."""
        return self._states[tier]

    def agrees(self, summary: CacheSummary) -> bool:
        """Whether this view has come exactly as far as the summary, and has its counts and digests. O(1)."""
        return summary == (self.epoch, self.sequence, tuple(self._states))

    def check_invariants(self) -> None:
        """Compare the sets with what the stream has told; raises InvariantError. O(blocks)."""
        for tier in Tier:
            if _state_of(self._blocks[tier]) != self._states[tier]:
                raise InvariantError(
                    f"{self!r}: {tier.name} has the blocks of {_state_of(self._blocks[tier])}"
                )

    def __repr__(self) -> str:
        epoch = "none" if self.epoch is None else f"{self.epoch:016x}"
        tiers = ", ".join(f"{tier.name.lower()}={len(self._blocks[tier])}" for tier in Tier)
        return f"CacheView(epoch={epoch}, sequence={self.sequence}, {tiers})"

    def _begin(self, epoch: Epoch, sequence: int, blocks: Blocks) -> None:
        self.epoch, self.sequence = epoch, sequence
        self._blocks = blocks
        self._states = [_state_of(names) for names in blocks]

    def _change(self, event: Stored | Removed) -> None:
        state = self._states[event.tier]
        count, digest = state.count, state.digest
        for name in event.fingerprints:
            digest ^= name
        if isinstance(event, Stored):
            self._blocks[event.tier].update(event.fingerprints)
            count += len(event.fingerprints)
        else:
            self._blocks[event.tier].difference_update(event.fingerprints)
            count -= len(event.fingerprints)
        self._states[event.tier] = TierState(count, digest)


def _no_blocks() -> Blocks:
    return tuple(set() for _ in Tier)


def _state_of(blocks: set[Fingerprint]) -> TierState:
    digest = 0
    for name in blocks:
        digest ^= name
    return TierState(len(blocks), digest)
