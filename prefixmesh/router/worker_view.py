"""What a router believes one worker's cache to hold, and how far it may believe that. Pure.

A worker's stream brings a snapshot in parts, then numbered events, and between them reports with the cache's own sums. The view takes
them in, keeps count and digest *as the stream told them* (whatever the index has room for), and so can prove itself: when its sums are
those of a report that has come exactly as far, it holds what the worker holds.

    blind --first part--> catching_up --last part--> exact <----------------------------+
      ^                        ^                      |  report agrees, in time         |
      |                        |     silence: stale --+---------------------------------+
      +-- another life         +-- gap, another epoch, sums that differ: resync

Everything that goes wrong has one answer: ask for a snapshot (``Need.SNAPSHOT``), once, hear nothing more of that stream, and go on with
what was believed until the new one has brought it; but what a worker has cleared is never believed for a moment longer. A stream
brings a snapshot whole before anything else, so whatever comes before its last part tells that a part was lost.
"""

import enum
from collections import Counter
from typing import Final

from prefixmesh.cache.events import CacheSummary, Cleared, Event, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch
from prefixmesh.router.block_index import BlockIndex
from prefixmesh.router.predictions import Predictions

SILENT_INTERVALS: Final = 3.0
"""Reports that may be missed before a view is stale: one may be late, two may be lost with a connection that comes back."""


class Trust(enum.Enum):
    """How far a view may be believed."""

    EXACT = "exact"
    """The worker's last report agreed with it, in time."""

    CATCHING_UP = "catching_up"
    """A snapshot is being loaded; what was known before still counts."""

    STALE = "stale"
    """It was right once, and the worker is silent."""

    BLIND = "blind"
    """Nothing is known of this life of the worker."""


class Need(enum.Enum):
    """What the shell must do for a view."""

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"
    """Begin the stream anew, from a snapshot. Told once; what still comes from the old stream is left out."""


class WorkerView:
    """One worker's blocks in the index, and the proof of them. Not thread-safe."""

    def __init__(
        self, index: BlockIndex, predictions: Predictions, *, report_interval_s: float, now: float
    ) -> None:
        self._index = index
        self._predictions = predictions
        self.silent_s = SILENT_INTERVALS * report_interval_s
        """Without news for longer the view is stale. May be set anew with each stream, to so many of its intervals or more."""

        self.slot = index.open_slot()
        """Where the index counts this worker now. It changes when a snapshot is complete."""

        self.epoch: Epoch | None = None
        self.sequence = 0
        """Of the last event that is counted in."""

        self.causes: Counter[str] = Counter()
        """How often a snapshot was asked for, by cause."""

        self.last_cause = ""
        """Of the last time."""

        self._sums = _no_sums()
        self._loading: _Loading | None = None
        self._waits_for_snapshot = True
        self._is_muted = False
        self._heard_at = now
        self._is_exact = False

    def trust(self, now: float) -> Trust:
        """How far this view may be believed at ``now``. O(1)."""
        if self.epoch is None:
            return Trust.BLIND if self._loading is None else Trust.CATCHING_UP
        if self.is_silent(now):
            return Trust.STALE
        if self._waits_for_snapshot or self._loading is not None or not self._is_exact:
            return Trust.CATCHING_UP
        return Trust.EXACT

    def is_silent(self, now: float) -> bool:
        """Whether nothing was heard for so long that nothing that was said counts as news. O(1)."""
        return now - self._heard_at > self.silent_s

    def heard(self, now: float) -> None:
        """The worker has said something that is not of its cache. O(1)."""
        self._heard_at = now

    @property
    def resume_from(self) -> tuple[Epoch, int] | None:
        """Where a new stream may go on; None when it must begin with a snapshot."""
        if self.epoch is None or self._waits_for_snapshot:
            return None
        return self.epoch, self.sequence

    def on_opened(self) -> None:
        """A new stream has begun, from ``resume_from``: what comes from now on is its."""
        self._abandon()
        self._is_muted = False

    def on_part(self, part: SnapshotPart, now: float) -> None:
        """A part of a snapshot. Nothing of it counts before the last has come. O(its fingerprints)."""
        if self._is_muted:
            return
        self._heard_at = now
        loading = self._loading
        if loading is None or loading.of != (part.epoch, part.sequence):
            self._abandon()
            loading = self._loading = _Loading(part, self._index.open_slot())
        self._index.stored(loading.slot, part.tier, part.fingerprints)
        _count(loading.sums, part.tier, part.fingerprints, +1)
        if part.last:
            self._loading = None
            self._change_over(loading)

    def on_event(self, event: Event, now: float) -> Need:
        """The stream's next event. O(its fingerprints)."""
        if isinstance(event, Cleared):
            return self._on_cleared(event, now)
        if self._is_muted:
            return Need.NOTHING
        self._heard_at = now
        if self._waits_for_snapshot or self._loading is not None:
            return self._ask("part_lost")
        if event.epoch != self.epoch:
            # Its beginning was lost: nothing of what was believed is there any more.
            self._forget()
            return self._ask("other_epoch")
        if event.sequence <= self.sequence:
            return Need.NOTHING  # told twice
        if event.sequence != self.sequence + 1:
            return self._ask("gap")
        self._apply(event)
        self.sequence = event.sequence
        return Need.NOTHING

    def on_report(self, summary: CacheSummary, now: float) -> Need:
        """The worker's own sums: proof that this view is right, or that it is not. O(1)."""
        if self._is_muted:
            return Need.NOTHING
        self._heard_at = now
        if self._waits_for_snapshot or self._loading is not None:
            return self._ask("part_lost")
        if summary.epoch != self.epoch:
            self._forget()
            return self._ask("other_epoch")
        if summary.sequence < self.sequence:
            return Need.NOTHING  # an old one, overtaken
        if summary.sequence > self.sequence:
            return self._ask("gap")
        if tuple(self._sums) != summary.states:
            return self._ask("sums_differ")
        self._is_exact = True
        return Need.NOTHING

    def distrust(self, cause: str) -> None:
        """What the stream said made no sense: only a snapshot helps."""
        if not self._is_muted:
            self._ask(cause)

    def on_broken(self) -> None:
        """The stream has ended. What was being loaded is void; what is known counts, until silence makes it stale."""
        self._abandon()
        self._is_exact = False

    def on_new_life(self) -> None:
        """The worker has restarted: its cache is empty, and nothing that was expected will come. O(sets of holders)."""
        self._forget()
        self._predictions.end_all(self.slot)
        self._waits_for_snapshot = True

    def close(self) -> None:
        """The worker is known no longer: give back its slots. The view must not be used after that."""
        self._abandon()
        self._predictions.end_all(self.slot)
        self._index.close_slot(self.slot)

    def state(self, tier: Tier) -> TierState:
        """Count and digest as the stream has told them. O(1)."""
        return self._sums[tier]

    def __repr__(self) -> str:
        epoch = "none" if self.epoch is None else f"{self.epoch:016x}"
        tiers = ", ".join(f"{tier.name.lower()}={self._sums[tier].count}" for tier in Tier)
        return f"<WorkerView slot {self.slot} epoch={epoch} sequence={self.sequence} {tiers} resyncs={sum(self.causes.values())}>"

    def _on_cleared(self, event: Cleared, now: float) -> Need:
        if event.epoch != self.epoch:
            self._forget()
            if not self._is_muted:
                # From an empty cache on, events alone are the whole truth.
                self._heard_at = now
                self.epoch, self.sequence = event.epoch, event.sequence
                self._waits_for_snapshot = False
        return Need.NOTHING

    def _apply(self, event: Stored | Removed) -> None:
        if isinstance(event, Stored):
            self._index.stored(self.slot, event.tier, event.fingerprints)
            _count(self._sums, event.tier, event.fingerprints, +1)
        else:
            self._index.removed(self.slot, event.tier, event.fingerprints)
            _count(self._sums, event.tier, event.fingerprints, -1)

    def _ask(self, cause: str) -> Need:
        self.causes[cause] += 1
        self.last_cause = cause
        self._abandon()
        self._waits_for_snapshot = self._is_muted = True
        self._is_exact = False
        return Need.SNAPSHOT

    def _forget(self) -> None:
        """Believe nothing of the worker's cache. Predictions stay: requests that are under way will compute their blocks."""
        self._abandon()
        self._replace_slot(self._index.open_slot())
        self.epoch, self.sequence = None, 0
        self._sums = _no_sums()
        self._is_exact = False

    def _change_over(self, loading: "_Loading") -> None:
        self._replace_slot(loading.slot)
        self.epoch, self.sequence = loading.of
        self._sums = loading.sums
        self._waits_for_snapshot = False

    def _replace_slot(self, slot: int) -> None:
        old, self.slot = self.slot, slot
        self._predictions.move(old, slot)
        self._index.close_slot(old)

    def _abandon(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            self._index.close_slot(loading.slot)


class _Loading:
    """A snapshot on its way."""

    __slots__ = ("of", "slot", "sums")

    def __init__(self, part: SnapshotPart, slot: int) -> None:
        self.of = (part.epoch, part.sequence)
        self.slot = slot
        self.sums = _no_sums()


def _no_sums() -> list[TierState]:
    return [TierState(0, 0) for _ in Tier]


def _count(sums: list[TierState], tier: Tier, fingerprints: tuple[int, ...], sign: int) -> None:
    digest = sums[tier].digest
    for name in fingerprints:
        digest ^= name
    sums[tier] = TierState(sums[tier].count + sign * len(fingerprints), digest)
