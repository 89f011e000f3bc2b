"""One node of a cache's tree: an edge of whole pages, the pages that hold its KV, and who uses it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from prefixmesh.cache.base import PageIndices

NO_PAGES: Final["PageIndices"] = np.empty(0, dtype=np.int32)


class TreeNode:
    """A run of whole pages below ``parent``. Compared and hashed by identity.

    A node's *end* is what a handle means: the prefix from the root through its key. When an edge is split, the object keeps
    its end and a new node takes the front part, so that handles and receipts given out before stay right.
    """

    __slots__ = (
        "children",
        "creation_time",
        "edge",
        "hit_count",
        "key",
        "last_access_time",
        "lock_ref",
        "parent",
        "receipts",
        "value",
    )

    def __init__(
        self, parent: "TreeNode | None", edge: bytes, key: bytes, value: "PageIndices", now: float
    ) -> None:
        self.parent = parent
        """None for a root, and for a node that is no longer in any tree."""
        self.edge = edge
        """What ``parent.children`` knows this node by."""
        self.key = key
        """Packed tokens of the edge, whole pages."""
        self.value = value
        """Page indices of the edge's KV; an array of its own, never a view."""
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        """Receipts that protect this node: those given for it and those given for any node below it."""
        self.receipts = 0
        """Receipts given for exactly this node: what ``lock_ref`` can be recomputed from."""
        self.creation_time = now
        self.last_access_time = now
        self.hit_count = 0
        """How many matches went through this node."""

    def __repr__(self) -> str:
        return (
            f"TreeNode(pages={len(self.value)}, lock_ref={self.lock_ref}, hit_count={self.hit_count}, "
            f"children={len(self.children)})"
        )


def make_root() -> TreeNode:
    """A node that stands for the empty prefix: it holds no page and is never evicted."""
    return TreeNode(None, b"", b"", NO_PAGES, 0.0)


def nodes_below(root: TreeNode) -> Iterator[tuple[int, TreeNode]]:
    """Every node below ``root`` with its depth, parents before children; O(nodes), and no recursion, however deep."""
    stack = [(1, child) for child in reversed(root.children.values())]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children.values()))
