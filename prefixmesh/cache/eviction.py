"""The order in which unlocked nodes are given up: least recently used first, and a child always before its parent.

All unlocked nodes are in it, not only leaves. Every use goes along a whole path and enters the path deepest node first, so a
parent always stands behind its children: *the first in line is always a leaf*, and once the last child has gone the parent
stands where its own last use put it. Nothing has to be searched, sorted or rebuilt. (A heap of leaves would need either stale
entries, which turn up in bursts, or a search for a parent's place when it becomes a leaf.)

A locked node is in use, so it is not in line; its release is its last use and puts it at the back.

The order is that of the calls, whatever clock their ``now`` came from.
"""

from collections import OrderedDict
from collections.abc import Iterator

from prefixmesh.cache.node import TreeNode


class EvictionOrder:
    """Unlocked nodes, least recently used first. Every operation is O(1)."""

    __slots__ = ("_line", "refresh")

    def __init__(self) -> None:
        self._line: OrderedDict[TreeNode, None] = OrderedDict()
        # The one call on the path of every match, once per node: bound here, it costs no Python frame.
        self.refresh = self._line.move_to_end
        """``refresh(node)`` puts a node that is in line at the back."""

    def add(self, node: TreeNode) -> None:
        """Put a node at the back: its children must stand before it already."""
        self._line[node] = None

    def remove(self, node: TreeNode) -> None:
        """Take a node out of line, because it is locked or gone."""
        del self._line[node]

    def first(self) -> TreeNode | None:
        """The next to go, a leaf; None when everything is locked or nothing is there."""
        return next(iter(self._line), None)

    def clear(self) -> None:
        """Forget all."""
        self._line.clear()

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._line)

    def __len__(self) -> int:
        return len(self._line)
