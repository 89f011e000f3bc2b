"""A cache's books as anyone would keep them: a bag of names per tier; and names that make collisions and shards common."""

from collections import Counter
from collections.abc import Iterable

from prefixmesh.cache.events import CacheSummary, SnapshotPart, TierState
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.sharded_blocks import SHARD_SHIFT
from prefixmesh.cache.snapshot import Snapshot
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.view import CacheView
from prefixmesh.ids import Epoch, Fingerprint

Names = tuple[Fingerprint, ...]
Sets = tuple[frozenset[Fingerprint], ...]

ALPHABET: Names = tuple(
    Fingerprint((shard << SHARD_SHIFT) + low)
    for shard, low in [(0, 1), (0, 2), (1, 1), (1, 3), (2, 5), (1023, 9), (1023, 4)]
)
"""Few names, so that two blocks often have the same; several in a shard, and the first and last shard among them."""


EPOCHS = tuple(Epoch((1 + life * 0x9E3779B97F4A7C15) % 2**64) for life in range(100))
"""The lives of a publisher under test: in no order, for nothing but equality may be relied on."""


def make_publisher(
    *, log_events: int = 100, log_blocks: int = 1000, max_snapshots: int = 3
) -> CachePublisher:
    """A publisher with small bounds and epochs that come in a fixed order."""
    lives = iter(EPOCHS)
    return CachePublisher(
        lambda: next(lives), log_events=log_events, log_blocks=log_blocks, max_snapshots=max_snapshots
    )


class NaiveBooks:
    """A bag per tier, and what is to be announced of each change."""

    def __init__(self) -> None:
        self.bags: list[Counter[Fingerprint]] = [Counter() for _ in Tier]

    def stored(
        self, tier: Tier, parent: Fingerprint | None, names: Names
    ) -> list[tuple[Fingerprint | None, Names]]:
        """The runs of names that are new, each with the name before it."""
        runs: list[tuple[Fingerprint | None, Names]] = []
        extends = False
        for name in names:
            new = not self.bags[tier][name]
            self.bags[tier][name] += 1
            if new and extends:
                runs[-1] = (runs[-1][0], (*runs[-1][1], name))
            elif new:
                runs.append((parent, (name,)))
            parent, extends = name, new
        return runs

    def removed(self, tier: Tier, names: Names) -> Names:
        """The names of which the last has gone."""
        gone = []
        for name in names:
            self.bags[tier][name] -= 1
            assert self.bags[tier][name] >= 0
            if not self.bags[tier][name]:
                gone.append(name)
        return tuple(gone)

    def cleared(self) -> None:
        for bag in self.bags:
            bag.clear()

    def bag(self, tier: Tier) -> list[Fingerprint]:
        """Every name as often as there are blocks of it."""
        return sorted(self.bags[tier].elements())

    def sets(self) -> Sets:
        return tuple(frozenset(+bag) for bag in self.bags)


def read_out(snapshot: Snapshot, max_blocks: int = 2) -> list[SnapshotPart]:
    """What is left of a snapshot; a failure, not a hang, when it does not end."""
    parts: list[SnapshotPart] = []
    while (part := snapshot.next_part(max_blocks)) is not None:
        parts.append(part)
        assert len(parts) < 10_000, snapshot
    return parts


def states_of(sets: Iterable[Iterable[Fingerprint]]) -> tuple[TierState, ...]:
    """Count and digest of plain sets."""
    states = []
    for names in map(set, sets):
        digest = 0
        for name in names:
            digest ^= name
        states.append(TierState(len(names), digest))
    return tuple(states)


def summary_of(epoch: Epoch, sequence: int, sets: Sets) -> CacheSummary:
    return CacheSummary(epoch, sequence, states_of(sets))


def sets_of(view: CacheView) -> Sets:
    return tuple(frozenset(view.blocks(tier)) for tier in Tier)
