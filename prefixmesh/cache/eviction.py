"""The order in which the nodes of one payer are given up, and by which policy.

All evictable nodes of a payer stand in its line, not only leaves. Every use goes along a whole path and enters the path deepest
node first, and whatever ranks a node (hits, priority) ranks its parent at least as high, so a parent always stands behind its
children: *the first in line is always a leaf* as far as this payer's nodes go, and once the last child has gone the parent
stands where its own last use put it. Nothing has to be searched, sorted or rebuilt. (A heap of leaves would need either stale
entries, which turn up in bursts, or a search for a parent's place when it becomes a leaf.)

A locked node is in use, so it is not in line; its release is its last use and puts it at the back (of its rank).
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

_STALE_RANKS: Final = 64
"""Ranks without a node that may lie in a line's heap before it is cleared of them: hits only rise, so a hot node leaves a
rank behind at every match."""


class EvictionLine(Protocol):
    """One payer's evictable nodes, next to go first."""

    enter: Callable[[TreeNode], object]
    """Put a node at the back of its rank: its children must stand before it already. O(1), ranked O(log ranks)."""
    leave: Callable[[TreeNode], object]
    """Take a node out of line, because it is locked or gone. O(1)."""
    refresh: Callable[[TreeNode], object]
    """Put a node that is in line, and may have risen in rank, at the back of its rank."""

    def enter_first(self, node: TreeNode) -> None:
        """Put a node before all others of its rank: for what is left of the node that was first. O(1)."""
        ...

    def first(self) -> TreeNode | None:
        """The next to go; None when nobody is in line."""
        ...

    def rank(self, node: TreeNode) -> int:
        """What the policy compares before recency."""
        ...

    def __iter__(self) -> Iterator[TreeNode]: ...

    def __len__(self) -> int: ...


class LruLine:
    """Least recently used first. Every operation is one call of a C method, bound here so that it costs no Python frame."""

    __slots__ = ("_line", "enter", "leave", "refresh")

    def __init__(self) -> None:
        self._line: OrderedDict[TreeNode, None] = OrderedDict()
        self.enter: Callable[[TreeNode], object] = self._line.setdefault
        self.leave: Callable[[TreeNode], object] = self._line.pop
        self.refresh: Callable[[TreeNode], object] = self._line.move_to_end

    def enter_first(self, node: TreeNode) -> None:
        """Put a node before all others. O(1)."""
        self._line[node] = None
        self._line.move_to_end(node, last=False)

    def first(self) -> TreeNode | None:
        """The least recently used; O(1)."""
        return next(iter(self._line), None)

    def rank(self, node: TreeNode) -> int:
        """All alike."""
        return 0

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._line)

    def __len__(self) -> int:
        return len(self._line)


class RankedLine:
    """Lowest rank first, least recently used within a rank: one line per rank and a heap of the ranks that exist."""

    __slots__ = ("_buckets", "_rank_of", "_ranks", "_standing", "enter", "leave", "lowered", "refresh")

    def __init__(self, rank_of: Callable[[TreeNode], int]) -> None:
        self._rank_of = rank_of
        self._buckets: dict[int, OrderedDict[TreeNode, None]] = {}
        self._ranks: list[int] = []
        """A heap: every rank that has a bucket, and some that had."""
        self._standing: dict[TreeNode, int] = {}
        """Under which rank each node stands."""
        self.enter: Callable[[TreeNode], object] = self._enter
        self.leave: Callable[[TreeNode], object] = self._leave
        self.refresh: Callable[[TreeNode], object] = self._refresh
        self.lowered: Callable[[], None] = _nobody_cares
        """Told when the first in line has become one of a lower rank, or has become at all."""

    def _enter(self, node: TreeNode) -> None:
        rank = self._rank_of(node)
        self._standing[node] = rank
        bucket = self._buckets.get(rank)
        if bucket is not None:
            bucket[node] = None
            return
        lowest = self.first()
        self._buckets[rank] = OrderedDict.fromkeys((node,))
        if len(self._ranks) > 2 * len(self._buckets) + _STALE_RANKS:
            self._ranks = list(self._buckets)
            heapq.heapify(self._ranks)
        else:
            heapq.heappush(self._ranks, rank)
        if lowest is None or rank < self._standing[lowest]:
            self.lowered()

    def _leave(self, node: TreeNode) -> None:
        rank = self._standing.pop(node)
        bucket = self._buckets[rank]
        del bucket[node]
        if not bucket:
            del self._buckets[rank]

    def _refresh(self, node: TreeNode) -> None:
        rank = self._standing[node]
        if rank == self._rank_of(node):
            self._buckets[rank].move_to_end(node)
        else:
            self._leave(node)
            self._enter(node)

    def enter_first(self, node: TreeNode) -> None:
        """Put a node before all others of its rank. O(log ranks)."""
        self._enter(node)
        self._buckets[self._standing[node]].move_to_end(node, last=False)

    def first(self) -> TreeNode | None:
        """The least recently used of the lowest rank; O(1), and O(log ranks) for each rank that has died out since."""
        ranks = self._ranks
        while ranks:
            bucket = self._buckets.get(ranks[0])
            if bucket is not None:
                return next(iter(bucket))
            heapq.heappop(ranks)
        return None

    def rank(self, node: TreeNode) -> int:
        """The rank under which it stands."""
        return self._standing[node]

    def __iter__(self) -> Iterator[TreeNode]:
        for rank in sorted(self._buckets):
            yield from self._buckets[rank]

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


def _hits(node: TreeNode) -> int:
    return node.hit_count


def _priority(node: TreeNode) -> int:
    return node.priority


def _nobody_cares() -> None:
    """The default of ``lowered``."""
