"""The order in which the nodes of one payer are given up, and by which policy.

All evictable nodes of a payer stand in its line, not only leaves. Every use goes along a whole path and puts the path last, deepest
node first, and whatever ranks a node (hits, priority) ranks its parent at least as high, so a parent always stands behind its
children: *the first in line is always a leaf* as far as this payer's nodes go, and once the last child has gone the parent
stands where its own last use put it. Nothing has to be searched, sorted or rebuilt. (A heap of leaves would need either stale
entries, which turn up in bursts, or a search for a parent's place when it becomes a leaf.)

A locked node may stay in line: whoever asks for the first takes locked ones out as they come up, and a release, the last use of
what it protected, puts a node last whether it was in line or not. So a lock touches no line at all. (An eviction that comes upon
many locked nodes takes them all out, 0.2 us each; there are as many as running requests' paths have nodes.)
The order is that of the calls, whatever clock their ``now`` came from.

* ``lru``: least recently used first.
* ``lfu``: fewest hits first; among equals, least recently used first.
* ``priority``: lowest priority first; among equals, least recently used first.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol

from prefixmesh.cache.node import TreeNode

EvictionPolicy = Literal["lru", "lfu", "priority"]

SEGMENT_NODES: Final = 16_384
"""Nodes that one ordered dictionary holds. Now and then a dictionary makes itself anew, and with all the nodes of a large cache in
one that was the longest pause there was: 17 ms for 125,000."""

_STALE_RANKS: Final = 64
"""Ranks without a node that may lie in a line's heap before it is cleared of them: hits only rise, so a hot node leaves a
rank behind at every match."""

_Segment = OrderedDict[TreeNode, None]


class EvictionLine(Protocol):
    """One payer's evictable nodes, next to go first."""

    @property
    def refresh(self) -> Callable[[TreeNode], object]:
        """Put a node that is in line, and may have risen in rank, last of its rank. May raise KeyError, having done nothing, when
        it does not find the node at once; ``put_last`` then does it. (One call of a C method in nearly all cases.)"""
        ...

    def enter(self, node: TreeNode) -> None:
        """Put a node that is not in line last of its rank. Its children must stand before it already."""
        ...

    def put_last(self, node: TreeNode) -> None:
        """Put a node last of its rank, whether it is in line or not. Its children must stand before it already."""
        ...

    def put_first(self, node: TreeNode) -> None:
        """Put a node that is not in line before all others of its rank: for what is left of the node that was first."""
        ...

    def leave(self, node: TreeNode) -> None:
        """Take a node out of line; it must be in it."""
        ...

    def first(self) -> TreeNode | None:
        """The next to go; None when nobody is in line."""
        ...

    def rank(self, node: TreeNode) -> int:
        """What the policy compares before recency."""
        ...

    def close(self) -> None:
        """The line's payer has gone, and with it whoever was told of the line."""
        ...

    def __iter__(self) -> Iterator[TreeNode]: ...

    def __reversed__(self) -> Iterator[TreeNode]: ...

    def __len__(self) -> int: ...


class LruLine:
    """Least recently used first, in segments of bounded length: what was used lately is in the last one, where a use is one call of
    a C method. O(1), and O(segments) look-ups for a node that was not."""

    __slots__ = ("_newest", "_segment_nodes", "_segments", "refresh")

    def __init__(self, segment_nodes: int = SEGMENT_NODES) -> None:
        self._segment_nodes = segment_nodes
        self._newest: _Segment = OrderedDict()
        self._segments = [self._newest]
        """Oldest first."""
        self.refresh: Callable[[TreeNode], object] = self._newest.move_to_end

    def put_last(self, node: TreeNode) -> None:
        """Put a node last, whether it is in line or not."""
        for segment in self._segments:
            if node in segment:
                del segment[node]
                break
        self.enter(node)

    def enter(self, node: TreeNode) -> None:
        """Put a node that is not in line last."""
        if len(self._newest) >= self._segment_nodes:
            self._open_segment()
        self._newest[node] = None

    def put_first(self, node: TreeNode) -> None:
        """Put a node that is not in line before all others."""
        oldest = self._segments[0]
        oldest[node] = None
        oldest.move_to_end(node, last=False)

    def leave(self, node: TreeNode) -> None:
        """Take a node out of line: at once when it was first."""
        for segment in self._segments:
            if node in segment:
                del segment[node]
                return
        raise KeyError(node)

    def first(self) -> TreeNode | None:
        """The least recently used; O(1), and once more for each segment that has run empty since."""
        while True:
            for node in self._segments[0]:
                return node
            if len(self._segments) == 1:
                return None
            del self._segments[0]

    def close(self) -> None:
        """Nothing to undo."""

    def rank(self, node: TreeNode) -> int:
        """All alike."""
        return 0

    def _open_segment(self) -> None:
        """Begin a new last segment, and join two neighbours that have room in one: so there are never many more than needed. A
        segment's length of work, once a segment's length of calls."""
        for index in range(len(self._segments) - 1):
            older, newer = self._segments[index : index + 2]
            if len(older) + len(newer) <= self._segment_nodes:
                for node in reversed(older):
                    newer[node] = None
                    newer.move_to_end(node, last=False)
                del self._segments[index]
                break
        self._newest = OrderedDict()
        self._segments.append(self._newest)
        self.refresh = self._newest.move_to_end

    def __iter__(self) -> Iterator[TreeNode]:
        for segment in self._segments:
            yield from segment

    def __reversed__(self) -> Iterator[TreeNode]:
        for segment in reversed(self._segments):
            yield from reversed(segment)

    def __len__(self) -> int:
        return sum(map(len, self._segments))


class RankedLine:
    """Lowest rank first, least recently used within a rank: one LRU line per rank and a heap of the ranks that exist."""

    __slots__ = ("_buckets", "_rank_of", "_ranks", "_standing", "lowered")

    def __init__(self, rank_of: Callable[[TreeNode], int]) -> None:
        self._rank_of = rank_of
        self._buckets: dict[int, LruLine] = {}
        self._ranks: list[int] = []
        """A heap: every rank that has a bucket, and some that had."""
        self._standing: dict[TreeNode, int] = {}
        """Under which rank each node stands."""
        self.lowered: Callable[[], None] = _nobody_cares
        """Told when the first in line has become one of a lower rank, or has become at all. Whoever is told holds the line:
        ``close`` undoes that."""

    def close(self) -> None:
        """Tell nobody any more. Lines come and go with their payers, and must leave no ring of references behind: a cache's
        garbage is freed by counting alone."""
        self.lowered = _nobody_cares

    def refresh(self, node: TreeNode) -> None:
        """As ``put_last``."""
        self.put_last(node)

    def enter(self, node: TreeNode) -> None:
        """Put a node that is not in line last of its rank. O(log ranks)."""
        self._put(node, LruLine.enter)

    def put_last(self, node: TreeNode) -> None:
        """Put a node last of the rank that it has now. O(log ranks)."""
        standing = self._standing.get(node)
        if standing is not None and standing != self._rank_of(node):
            self.leave(node)
        self._put(node, LruLine.put_last)

    def put_first(self, node: TreeNode) -> None:
        """Put a node that is not in line before all others of its rank. O(log ranks)."""
        self._put(node, LruLine.put_first)

    def leave(self, node: TreeNode) -> None:
        """Take a node out of line."""
        rank = self._standing.pop(node)
        bucket = self._buckets[rank]
        bucket.leave(node)
        if bucket.first() is None:
            del self._buckets[rank]

    def _put(self, node: TreeNode, put: Callable[[LruLine, TreeNode], None]) -> None:
        rank = self._standing[node] = self._rank_of(node)
        bucket = self._buckets.get(rank)
        if bucket is not None:
            put(bucket, node)
            return
        lowest = self.first()
        bucket = self._buckets[rank] = LruLine()
        put(bucket, node)
        if len(self._ranks) > 2 * len(self._buckets) + _STALE_RANKS:
            self._ranks = list(self._buckets)
            heapq.heapify(self._ranks)
        else:
            heapq.heappush(self._ranks, rank)
        if lowest is None or rank < self._standing[lowest]:
            self.lowered()

    def first(self) -> TreeNode | None:
        """The least recently used of the lowest rank; O(1), and O(log ranks) for each rank that has died out since."""
        ranks = self._ranks
        while ranks:
            bucket = self._buckets.get(ranks[0])
            if bucket is not None:
                return bucket.first()
            heapq.heappop(ranks)
        return None

    def rank(self, node: TreeNode) -> int:
        """The rank under which it stands."""
        return self._standing[node]

    def __iter__(self) -> Iterator[TreeNode]:
        for rank in sorted(self._buckets):
            yield from self._buckets[rank]

    def __reversed__(self) -> Iterator[TreeNode]:
        for rank in sorted(self._buckets, reverse=True):
            yield from reversed(self._buckets[rank])

    def __len__(self) -> int:
        return len(self._standing)


def make_line(policy: EvictionPolicy) -> LruLine | RankedLine:
    """An empty line under this policy."""
    match policy:
        case "lru":
            return LruLine()
        case "lfu":
            return RankedLine(_hits)
        case "priority":
            return RankedLine(_priority)


def rank_under(policy: EvictionPolicy, node: TreeNode) -> int:
    """What this policy compares before recency, for a node that is in no line."""
    match policy:
        case "lru":
            return 0
        case "lfu":
            return _hits(node)
        case "priority":
            return _priority(node)


def _hits(node: TreeNode) -> int:
    return node.hit_count


def _priority(node: TreeNode) -> int:
    return node.priority


def _nobody_cares() -> None:
    """The default of ``lowered``."""
