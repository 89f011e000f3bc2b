"""What a cache tells about itself: events of whole blocks, the parts of a snapshot, and the sums that prove a view right.

Three kinds of events say which whole blocks came to a tier, which went, and that all went. They are numbered within an epoch,
one by one, so that a reader sees a gap. Replayed into a plain set per tier, from the beginning or from any snapshot, they give
the cache's blocks at every step (rule 11 of the cache). This file has the words only: the cache speaks to an ``EventSink``, the
publisher numbers and keeps what it hears, and a view replays it. Fingerprints here may route; they never hit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Fingerprint


class Stored(NamedTuple):
    """These blocks are on the tier now, and were not before."""

    epoch: Epoch
    sequence: int
    tier: Tier
    parent: Fingerprint | None
    """The block before the first; None when the first begins its namespace."""
    fingerprints: tuple[Fingerprint, ...]
    """A chain: each is the parent of the next. Never empty."""


class Removed(NamedTuple):
    """These blocks were on the tier, and are not now."""

    epoch: Epoch
    sequence: int
    tier: Tier
    fingerprints: tuple[Fingerprint, ...]
    """In no order that means anything. Never empty, none twice."""


class Cleared(NamedTuple):
    """A new epoch has begun, with no blocks on any tier."""

    epoch: Epoch
    sequence: int
    """Always 0: the first event of its epoch."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class TierState:
    """What proves a view of a tier: equal sets have equal states, and others hardly ever.

    No tuple, since ``count`` is a method of those.
    """

    count: int
    """Different fingerprints on the tier."""
    digest: int
    """The XOR of them; 0 when there are none."""


class CacheSummary(NamedTuple):
    """A cache's sums at one moment; a report carries it, and a view that has come as far must have the same."""

    epoch: Epoch
    sequence: int
    """Of the last event that is counted in."""
    states: tuple[TierState, ...]
    """One per tier, in the order of ``Tier``."""


class SnapshotPart(NamedTuple):
    """Some of the blocks of one tier at the moment (epoch, sequence); with the other parts, all of them."""

    epoch: Epoch
    sequence: int
    """Of the last event before the snapshot was opened: a reader goes on with the next."""
    tier: Tier
    fingerprints: tuple[Fingerprint, ...]
    """In no order. None twice in a snapshot; empty only when the whole cache was."""
    last: bool
    """Whether the snapshot is complete with this part."""


class EventSink(Protocol):
    """Who is told, by the cache, of every whole block that came or went. Called on the cache's hot path."""

    __slots__ = ()

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        """A chain of blocks came to the tier, the first after ``parent`` (None: the first of its namespace)."""

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        """Blocks left the tier; each was told as stored before."""

    def cleared(self) -> None:
        """Everything left every tier at once: a flush."""


class _NoEvents(EventSink):
    """A sink that does nothing."""

    __slots__ = ()

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        pass

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        pass

    def cleared(self) -> None:
        pass

    def __repr__(self) -> str:
        return "NO_EVENTS"


NO_EVENTS: Final[EventSink] = _NoEvents()
"""For a cache that nobody watches. Each call costs an empty method call."""
