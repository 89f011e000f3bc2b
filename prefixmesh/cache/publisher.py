"""What the world is told of a cache: the books of its blocks per tier, numbered events, and snapshots that never stop it.

The publisher hears from the tree (as its ``EventSink``) and keeps its own books, so that a snapshot needs no walk through the
tree and no pause: it is read in parts, between which the cache goes on, and is of the moment at which it was opened. It does not
send anything and knows no readers; whoever does asks ``events_since`` and opens snapshots. See ``prefixmesh.cache.view`` for the
other end.

    follow:   events = publisher.events_since(view.epoch, view.sequence)
              apply them; when None: snapshot = publisher.open_snapshot(), load its parts, and follow from there;
              when next_part() gives None before the last part, the snapshot is void (a flush): open another.
"""

import weakref
from collections.abc import Callable, Sequence

from prefixmesh.cache.event_log import LOG_BLOCKS, LOG_EVENTS, REMOVED, STORED, EventLog, Record
from prefixmesh.cache.events import CacheSummary, Cleared, Event, EventSink, TierState
from prefixmesh.cache.sharded_blocks import ShardedBlocks
from prefixmesh.cache.snapshot import Snapshot
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError, OverloadedError
from prefixmesh.ids import Epoch, Fingerprint

BACKLOG = 256
"""Events that were told and are not in the books yet, at most. The cache's calls only note what happened, at a tenth of the cost; the
books follow when somebody reads them, once a step, or here."""

BACKLOG_BLOCKS = 2_048
"""The same bound in blocks, for the chains of long prompts: about a millisecond's work."""

MAX_SNAPSHOTS = 8
"""Open at once. Each may keep a copy of all that changes while it is open; routers come one by one, or after a flush, when there
is nothing to copy."""


class CachePublisher(EventSink):
    """The books, the numbered events and the snapshots of one worker's cache.

    Told by the cache: ``stored``, ``removed``, ``cleared``. For readers: ``events_since``, ``open_snapshot``, ``beginning``,
    ``summary``, ``state``, ``epoch``, ``sequence``. Not for several threads.
    """

    __slots__ = (
        "_backlog",
        "_backlog_blocks",
        "_blocks",
        "_log",
        "_max_snapshots",
        "_new_epoch",
        "_snapshots",
        "unknown_removals",
    )

    def __init__(
        self,
        new_epoch: Callable[[], Epoch],
        *,
        log_events: int = LOG_EVENTS,
        log_blocks: int = LOG_BLOCKS,
        max_snapshots: int = MAX_SNAPSHOTS,
    ) -> None:
        """``new_epoch`` draws a random 64-bit number for each life; the bounds are smaller in tests."""
        self._new_epoch = new_epoch
        self._max_snapshots = max_snapshots
        self._log = EventLog(new_epoch(), log_events, log_blocks)
        self._blocks = [ShardedBlocks() for _ in Tier]
        self._backlog: list[Record] = []
        self._backlog_blocks = 0
        self.unknown_removals = 0
        """Blocks that left and were never told: bugs of the cache's that were survived."""
        self._snapshots: list[weakref.ref[Snapshot]] = []

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        """A chain of blocks came to the tier. O(fingerprints), most of it later (``catch_up``).

        One event; none for a fingerprint that another block has on the tier already, so that it may also become none, or several
        (a chain around such a block).
        """
        names = tuple(fingerprints)
        self._backlog.append((STORED + tier, parent, names))
        self._backlog_blocks += len(names)
        if len(self._backlog) >= BACKLOG or self._backlog_blocks >= BACKLOG_BLOCKS:
            self.catch_up()

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        """Blocks left the tier. O(fingerprints), most of it later (``catch_up``).

        One event, for those fingerprints that no other block has; none if there are none. One that was never told is a bug of the
        cache's: it is left out, and ``unknown_removals`` counts it.
        """
        names = tuple(fingerprints)
        self._backlog.append((REMOVED + tier, None, names))
        self._backlog_blocks += len(names)
        if len(self._backlog) >= BACKLOG or self._backlog_blocks >= BACKLOG_BLOCKS:
            self.catch_up()

    def catch_up(self) -> None:
        """Bring the books up to what was told; every reading does. O(fingerprints told since)."""
        backlog, self._backlog, self._backlog_blocks = self._backlog, [], 0
        for kind, parent, names in backlog:
            if kind >= REMOVED:
                self._catch_up_removed(kind, names)
                continue
            known = self._blocks[kind - STORED].add(names)
            if known:
                self._announce_runs(kind, parent, names, known)
            elif names:
                self._log.append((kind, parent, names))

    def _catch_up_removed(self, kind: int, names: tuple[Fingerprint, ...]) -> None:
        try:
            gone = self._blocks[kind - REMOVED].remove(names)
        except InvariantError:
            gone = self._remove_what_is_there(kind, names)
        if gone:
            self._log.append((kind, None, gone))

    def _remove_what_is_there(self, kind: int, names: tuple[Fingerprint, ...]) -> tuple[Fingerprint, ...]:
        """Of a removal that cannot be right, the part that can: a name that was never told must not keep the others in the books."""
        gone: list[Fingerprint] = []
        for name in names:
            try:
                gone += self._blocks[kind - REMOVED].remove((name,))
            except InvariantError:
                self.unknown_removals += 1
        return tuple(gone)

    def cleared(self) -> None:
        """Everything left: a new epoch begins, and open snapshots become void. O(blocks), like the flush itself."""
        for snapshot in self._open_snapshots():
            snapshot.make_void()
        self._backlog, self._backlog_blocks = [], 0
        self._blocks = [ShardedBlocks() for _ in Tier]
        self._log.begin(self._new_epoch())

    @property
    def epoch(self) -> Epoch:
        """This life of the cache."""
        return self._log.epoch

    @property
    def sequence(self) -> int:
        """The number of the latest event in the epoch; 0 is its beginning."""
        self.catch_up()
        return self._log.sequence

    @property
    def beginning(self) -> Cleared:
        """The event that this epoch began with: with ``events_since(epoch, 0)`` a cheaper way in than a snapshot, after a flush."""
        return Cleared(self._log.epoch, 0)

    def state(self, tier: Tier) -> TierState:
        """Count and digest of the different fingerprints on the tier. O(1) when caught up."""
        self.catch_up()
        blocks = self._blocks[tier]
        return TierState(blocks.count, blocks.digest)

    def summary(self) -> CacheSummary:
        """Epoch, sequence and every tier's state: what a report carries. O(1) when caught up."""
        return CacheSummary(self._log.epoch, self.sequence, tuple(self.state(tier) for tier in Tier))

    def events_since(self, epoch: Epoch, sequence: int) -> Sequence[Event] | None:
        """The events of this epoch after ``sequence``, empty when there are none yet. O(events returned).

        None when only a snapshot helps: too long ago for the log, another epoch, or not yet happened.
        """
        self.catch_up()
        return self._log.since(epoch, sequence)

    def open_snapshot(self) -> Snapshot:
        """Begin to read what is on every tier now. O(shards); close it, or read it to its end.

        At most ``max_snapshots`` at once. One more is refused with OverloadedError, and the readers have until the next attempt to
        go on with theirs: one that has not by then becomes void, and makes room. (There is no clock here to say "too long".)
        """
        open_ones = self._open_snapshots()
        if len(open_ones) >= self._max_snapshots:
            abandoned = _find_abandoned(open_ones)
            abandoned.make_void()
            open_ones.remove(abandoned)
        snapshot = Snapshot(self.summary(), [blocks.open_reader() for blocks in self._blocks])
        self._snapshots = [weakref.ref(one) for one in (*open_ones, snapshot)]
        return snapshot

    def check_invariants(self) -> None:
        """Recompute the books of every tier, the log's and the snapshots'; raises InvariantError. O(blocks + events kept)."""
        self.catch_up()
        if self.unknown_removals:
            raise InvariantError(f"{self!r}: {self.unknown_removals} times a block left that was never told")
        for blocks in self._blocks:
            blocks.check_invariants()
        self._log.check_invariants()
        if len(self._open_snapshots()) > self._max_snapshots:
            raise InvariantError(f"{self!r}: more snapshots are open than {self._max_snapshots}")

    def __repr__(self) -> str:
        self.catch_up()
        tiers = ", ".join(f"{tier.name.lower()}={self._blocks[tier].count}" for tier in Tier)
        return (
            f"CachePublisher(epoch={self.epoch:016x}, sequence={self.sequence}, {tiers}, "
            f"log={len(self._log)}, snapshots={len(self._open_snapshots())})"
        )

    def _announce_runs(
        self, kind: int, parent: Fingerprint | None, names: tuple[Fingerprint, ...], known: tuple[int, ...]
    ) -> None:
        """An event for each run of new fingerprints between those at the positions that are ``known``."""
        start = 0
        for end in (*known, len(names)):
            if start < end:
                self._log.append((kind, names[start - 1] if start else parent, names[start:end]))
            start = end + 1

    def _open_snapshots(self) -> list[Snapshot]:
        return [one for known in self._snapshots if (one := known()) is not None and not one.closed]


def _find_abandoned(snapshots: list[Snapshot]) -> Snapshot:
    """The oldest that nobody has read from since the last attempt; else OverloadedError, and this was the last attempt."""
    for snapshot in snapshots:
        if not snapshot.advanced:
            return snapshot
    for snapshot in snapshots:
        snapshot.advanced = False
    raise OverloadedError(
        f"{len(snapshots)} snapshots of the cache are being read; try again when one is done"
    )
