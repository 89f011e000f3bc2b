"""The events of the present epoch, numbered, and the latest of them kept for readers that follow.

Bounded in events and in blocks. A reader that is further behind than the log reaches takes a snapshot, which is then the cheaper
way too. What is kept of an event is a plain tuple, made into the event when somebody asks: the hot path is spared 0.2 of 0.8 µs,
and plain tuples of plain numbers are no work for the garbage collector.
"""

from collections import deque
from itertools import islice

from prefixmesh.cache.events import Event, Removed, Stored
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Epoch, Fingerprint

LOG_EVENTS = 2048
"""A busy worker has a few thousand events a second, and readers ask several times a second. About 150 bytes each: a log that
outgrows the processor's cache costs every event the time to fetch what it drops."""

LOG_BLOCKS = 65_536
"""The names in those events, at 40 bytes each when the cache has forgotten them: 2.6 MB. 4 million tokens' worth of blocks of
64: to send more than that is no better than to send a snapshot."""

TIERS = tuple(Tier)
STORED = 0
REMOVED = len(TIERS)
"""A record's kind is one of these plus its tier: a plain number, where an enum would stay with the garbage collector."""

Record = tuple[int, Fingerprint | None, tuple[Fingerprint, ...]]
"""Kind and tier, parent, fingerprints."""


class EventLog:
    """Numbers events and keeps the latest. ``append`` on the hot path, ``since`` for readers, ``begin`` on a flush."""

    __slots__ = ("_blocks", "_max_blocks", "_max_events", "_records", "epoch", "sequence")

    def __init__(self, epoch: Epoch, max_events: int = LOG_EVENTS, max_blocks: int = LOG_BLOCKS) -> None:
        self.epoch = epoch
        self.sequence = 0
        """Of the latest event."""
        self._max_events = max_events
        self._max_blocks = max_blocks
        self._records: deque[Record] = deque()
        self._blocks = 0

    def append(self, record: Record) -> None:
        """Number the event and keep it, and forget the oldest that there is no room for. O(1), amortised."""
        records = self._records
        self.sequence += 1
        records.append(record)
        self._blocks += len(record[2])
        while self._blocks > self._max_blocks or len(records) > self._max_events:
            self._blocks -= len(records.popleft()[2])

    def begin(self, epoch: Epoch) -> None:
        """Start a new epoch at sequence 0. O(events kept)."""
        self.epoch = epoch
        self.sequence = 0
        self._records.clear()
        self._blocks = 0

    def since(self, epoch: Epoch, sequence: int) -> list[Event] | None:
        """The events after ``sequence``; none when there are none yet. O(events returned).

        None when the log cannot tell: too long ago, of another epoch, or not yet happened.
        """
        missing = self.sequence - sequence
        if epoch != self.epoch or not 0 <= missing <= len(self._records):
            return None
        latest_first = list(islice(reversed(self._records), missing))
        return [self._event(self.sequence - age, latest_first[age]) for age in range(missing - 1, -1, -1)]

    def __len__(self) -> int:
        return len(self._records)

    def check_invariants(self) -> None:
        """Recount what is kept; raises InvariantError. O(events kept)."""
        blocks = sum(len(names) for _, _, names in self._records)
        if blocks != self._blocks or blocks > self._max_blocks or len(self._records) > self._max_events:
            raise InvariantError(f"{self!r}: {blocks} blocks are kept, {self._blocks} counted")
        if len(self._records) > self.sequence:
            raise InvariantError(f"{self!r}: more events are kept than happened")

    def __repr__(self) -> str:
        return (
            f"EventLog(epoch={self.epoch:016x}, sequence={self.sequence}, "
            f"events={len(self._records)}/{self._max_events}, blocks={self._blocks}/{self._max_blocks})"
        )

    def _event(self, sequence: int, record: Record) -> Event:
        kind, parent, names = record
        if kind < REMOVED:
            return Stored(self.epoch, sequence, TIERS[kind], parent, names)
        return Removed(self.epoch, sequence, TIERS[kind - REMOVED], names)
