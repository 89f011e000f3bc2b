"""One node of a cache's tree: an edge of whole pages, the pages that hold its KV on each tier, and who uses it.

A node keeps its page indices packed, as it keeps its tokens: ``bytes`` compare, slice and join several times faster than arrays
of a few dozen numbers, and cost a third of their memory. ``value`` shows them as the array that kernels take.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from prefixmesh.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from prefixmesh.cache.base import PageIndices
    from prefixmesh.cache.owners import Payer
    from prefixmesh.ids import Fingerprint

INDEX_BYTES: Final = 4
"""Of one packed page index, int32."""

_INT32: Final = np.dtype(np.int32)

NO_PAGES: Final["PageIndices"] = np.empty(0, dtype=np.int32)
NO_PAGES.flags.writeable = False

NO_CHILDREN: Final[dict[bytes, "TreeNode"]] = {}
"""The children of every leaf. Shared and always empty: most nodes are leaves, and a dictionary each would be a tenth of the
memory and a third of what the garbage collector walks."""


class TreeNode:
    """A run of whole pages below ``parent``. Compared and hashed by identity.

    A node's *end* is what a handle means: the prefix from the root through its key. When an edge is split, the object keeps
    its end and a new node takes the front part, so that handles and receipts given out before stay right.
    """

    __slots__ = (
        "children",
        "creation_time",
        "edge",
        "hash_value",
        "hit_count",
        "host_children",
        "host_only_children",
        "host_pages",
        "host_pin_ref",
        "host_receipts",
        "host_ref_counter",
        "host_serial",
        "key",
        "last_access_time",
        "lock_ref",
        "pages",
        "parent",
        "payer",
        "pin_ref",
        "priority",
        "receipts",
        "serial",
        "start",
    )

    def __init__(
        self,
        parent: "TreeNode | None",
        edge: bytes,
        key: bytes,
        pages: bytes,
        now: float,
        payer: "Payer",
        start: int = 0,
    ) -> None:
        self.parent = parent
        """None for a root, and for a node that is no longer in any tree."""
        self.edge = edge
        """What ``parent.children`` knows this node by."""
        self.key = key
        """Packed tokens of the edge, whole pages."""
        self.pages = pages
        """Device pages of the edge's KV, packed; empty when it is not on the device."""
        self.host_pages = b""
        """Host pages of the edge's KV, packed, set only once their copy is complete; empty when it is not on the host."""
        self.children = NO_CHILDREN
        self.host_only_children = 0
        """Children that are not on the device."""
        self.host_children = 0
        """Children that are on the host, whether on the device too or not."""
        self.lock_ref = 0
        """Receipts that protect this node's device pages: those given for it and those given for any node below it."""
        self.receipts = 0
        """Receipts given for exactly this node: what ``lock_ref`` can be recomputed from."""
        self.host_ref_counter = 0
        """The same for its host pages."""
        self.host_receipts = 0
        self.pin_ref = 0
        """Pins whose prefix, as far as it is held on the device, goes through here; each of them is a lock as well."""
        self.host_pin_ref = 0
        """The same for pins of the host tier; each of them is a host lock as well."""
        self.creation_time = now
        self.last_access_time = now
        self.serial = 0
        """Number of the operation that used its device pages last: the order of the calls, which clocks need not tell."""
        self.host_serial = 0
        """The same for its host pages."""
        self.hit_count = 0
        """How many matches went through this node."""
        self.priority = 0
        """The highest of its users'."""
        self.hash_value: tuple[Fingerprint, ...] = ()
        """Fingerprints of the blocks that end in this edge, in order."""
        self.start = start
        """Tokens from the root to where this edge begins."""
        self.payer = payer
        """On whose account its pages are."""

    @property
    def value(self) -> "PageIndices":
        """Device pages of the edge's KV as a read-only int32 array; O(1), no copy."""
        return unpack_pages(self.pages)

    @property
    def host_value(self) -> "PageIndices":
        """Host pages of the edge's KV as a read-only int32 array; O(1), no copy."""
        return unpack_pages(self.host_pages)

    @property
    def on_device(self) -> bool:
        """Whether the device holds it. The root, which holds nothing, is nowhere."""
        return bool(self.pages)

    @property
    def on_host(self) -> bool:
        """Whether the host holds it, readable."""
        return bool(self.host_pages)

    @property
    def has_device_children(self) -> bool:
        """Whether it may not be evicted from the device for its children's sake. O(1)."""
        return len(self.children) > self.host_only_children

    @property
    def has_host_children(self) -> bool:
        """Whether it may not be evicted from the host for its children's sake. O(1)."""
        return self.host_children > 0

    def add_child(self, child: "TreeNode") -> None:
        """File ``child`` under its edge. O(1)."""
        if self.children is NO_CHILDREN:
            self.children = {child.edge: child}
        else:
            self.children[child.edge] = child

    def unlink(self) -> None:
        """Leave the parent; also what makes a stale handle recognisable. O(1)."""
        parent = self.parent
        if parent is None:
            return
        children = parent.children
        if len(children) == 1:
            parent.children = NO_CHILDREN
        else:
            del children[self.edge]
        self.parent = None

    def __repr__(self) -> str:
        return (
            f"TreeNode(pages={len(self.value)}, host_pages={len(self.host_value)}, lock_ref={self.lock_ref}, "
            f"host_ref_counter={self.host_ref_counter}, hit_count={self.hit_count}, children={len(self.children)})"
        )


def pack_pages(pages: "PageIndices") -> bytes:
    """Indices as a node keeps them. O(n)."""
    return pages.tobytes() if pages.dtype is _INT32 else pages.astype(_INT32).tobytes()


def unpack_pages(packed: bytes) -> "PageIndices":
    """Packed indices as a read-only array that keeps ``packed`` alive. O(1)."""
    return np.frombuffer(packed, _INT32)


def nodes_below(root: TreeNode) -> Iterator[tuple[int, TreeNode]]:
    """Every node below ``root`` with its depth, parents before children; O(nodes), and no recursion, however deep."""
    stack = [(1, child) for child in reversed(root.children.values())]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children.values()))


def nodes_from(node: TreeNode, start: int) -> list[TreeNode]:
    """The nodes on the path to ``node`` whose edges begin at token ``start`` or later, deepest first. O(nodes returned)."""
    path: list[TreeNode] = []
    at = node
    while at.parent is not None and at.start >= start:
        path.append(at)
        at = at.parent
    return path


def end_of(node: TreeNode) -> int:
    """Tokens from the root to where this edge ends; 0 for the root."""
    return node.start + len(node.key) // TOKEN_BYTES


def previous_fingerprint(node: TreeNode, page_bytes: int) -> "Fingerprint | None":
    """The name of the last block that ends before ``node``'s edge; None when its namespace has none there.

    O(1) but for edges shorter than a block, of which at most a block's length is climbed.
    """
    at = node
    # An edge at which a namespace begins is known by the namespace and its first page, all others by their first page.
    while len(at.edge) == page_bytes and at.parent is not None:
        at = at.parent
        if at.hash_value:
            return at.hash_value[-1]
    return None
