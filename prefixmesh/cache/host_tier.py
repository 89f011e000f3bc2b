"""The host tier's books: which nodes have a copy in host memory, who reads or extends those copies, and which goes next.

The second tier of the tree that ``accounting`` keeps. A node's ``host_value`` is set only once its copy is complete, and a node
on the host has its parent there. Slower than the device's books and written for clarity: it is touched by copies and by uses of
nodes that have one, not by every operation.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, unpack_pages
from prefixmesh.cache.owners import NOBODY, OwnerLines, Payer, Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import DoubleReleaseError


class HostFigures(NamedTuple):
    """Where the pages of the host tier are: the last four are all there is."""

    total: int = 0
    free: int = 0
    evictable: int = 0
    """Readable copies that could go for anybody."""
    protected: int = 0
    """Readable copies that a copy in flight, a pin or a floor keeps."""
    copying: int = 0
    """Destinations of backups in flight."""


class HostTier:
    """Host pages by node: counts, locks along paths (``host_ref_counter``), the payers' lines."""

    def __init__(self, allocator: PageAllocator, policy: EvictionPolicy, quotas: Mapping[str, Quota]) -> None:
        self.allocator = allocator
        self.lines = OwnerLines(
            policy, quotas, _host_pages, "host_serial", "host_ref_counter", "has_host_children"
        )
        self.cached_pages = 0
        """Host pages of all nodes, cut-off ones among them."""
        self.protected_pages = 0
        """Those of them that a lock protects."""

    def evictable_for(self, owner: str) -> int:
        """Host pages that ``owner`` could have. O(floors)."""
        return self.cached_pages - self.protected_pages - self.lines.sheltered_from(owner)

    def figures(self, copying: int) -> HostFigures:
        """Where the pages are, of which backups in flight own ``copying``. O(floors)."""
        evictable = self.evictable_for(NOBODY)
        kept = self.cached_pages - evictable
        return HostFigures(self.allocator.total_pages, self.allocator.free_pages, evictable, kept, copying)

    def attach(self, node: TreeNode, packed: bytes, serial: int) -> None:
        """``node``'s copy is complete in the ``packed`` pages. Its children on the host must have entered before. O(1)."""
        assert node.parent is not None
        node.parent.host_children += 1
        node.host_pages = packed
        node.host_serial = serial
        payer = self._payer(node)
        pages = len(packed) // INDEX_BYTES
        self.cached_pages += pages
        payer.pages += pages
        payer.line.enter(node)
        self.lines.changed(payer)

    def strip(self, node: TreeNode) -> bytes:
        """Take an unlocked node's copy away; returns its pages, packed, for the caller to free. O(1)."""
        assert not node.host_ref_counter
        assert node.parent is not None
        node.parent.host_children -= 1
        packed = node.host_pages
        payer = self._payer(node)
        payer.line.leave(node)
        node.host_pages = b""
        self._count_out(payer, len(packed) // INDEX_BYTES)
        return packed

    def trim(self, node: TreeNode, pages: int) -> bytes:
        """Cut ``pages`` pages off the copy of an unlocked leaf, whose edge the caller cuts alike; returns them,
        packed. O(edge)."""
        assert not node.host_ref_counter
        kept = len(node.host_pages) - pages * INDEX_BYTES
        tail = node.host_pages[kept:]
        node.host_pages = node.host_pages[:kept]
        self._count_out(self._payer(node), pages)
        return tail

    def split(self, node: TreeNode, upper: TreeNode, pages: int) -> None:
        """Divide a copy after ``pages`` pages between a node and its new upper half. O(edge)."""
        upper.host_ref_counter = node.host_ref_counter
        upper.host_serial = node.host_serial
        upper.host_pages = node.host_pages[: pages * INDEX_BYTES]
        node.host_pages = node.host_pages[pages * INDEX_BYTES :]
        if not node.host_ref_counter:
            self._payer(node).line.enter(upper)

    def touch(self, node: TreeNode, serial: int) -> None:
        """Note a use of one node; the path is touched deepest first. O(1)."""
        if node.host_pages and not node.host_ref_counter:
            node.host_serial = serial
            self._payer(node).line.put_last(node)

    def touch_path(self, node: TreeNode, serial: int) -> None:
        """Note a use of the path from ``node`` to the root. O(depth)."""
        at = node
        while (parent := at.parent) is not None:
            self.touch(at, serial)
            at = parent

    def put_first(self, node: TreeNode) -> None:
        """Let what is left of the node that was first in its line stand in its place. O(1)."""
        line = self._payer(node).line
        line.leave(node)
        line.put_first(node)

    def lock(self, node: TreeNode) -> LockReceipt:
        """Protect the copies on the path from ``node`` to the root. O(depth)."""
        receipt = LockReceipt(node)
        node.host_receipts += 1
        while (parent := node.parent) is not None:
            if not node.host_ref_counter:
                self.protected_pages += _host_pages(node)
                payer = self._payer(node)
                if payer.floor:
                    payer.locked_pages += _host_pages(node)
            node.host_ref_counter += 1
            node = parent
        node.host_ref_counter += 1
        return receipt

    def release(self, receipt: LockReceipt, gone: Payer, serial: int) -> None:
        """Undo one lock; what ``gone`` pays for was cut off by a flush and is freed with its last lock. O(depth).

        Raises DoubleReleaseError, changing nothing, when the receipt was used before.
        """
        node = receipt.node
        if node is None:
            raise DoubleReleaseError("a host lock's receipt was released twice")
        receipt.node = None
        node.host_receipts -= 1
        while (parent := node.parent) is not None:
            node.host_ref_counter -= 1
            if not node.host_ref_counter:
                self.protected_pages -= _host_pages(node)
                if node.payer is gone:
                    self._free_detached(node)
                else:
                    node.host_serial = serial
                    payer = self._payer(node)
                    if payer.floor:
                        payer.locked_pages -= _host_pages(node)
                    payer.line.put_last(node)
            node = parent
        node.host_ref_counter -= 1

    def detach_all(self, nodes: Sequence[TreeNode]) -> None:
        """Of the tree's ``nodes``, free the copies that nobody reads; the others are freed by their last release. O(nodes)."""
        for node in nodes:
            if node.host_pages and not node.host_ref_counter:
                self._free_detached(node)
        self.lines.clear()

    def _free_detached(self, node: TreeNode) -> None:
        packed, node.host_pages = node.host_pages, b""
        self.cached_pages -= len(packed) // INDEX_BYTES
        self.allocator.free(unpack_pages(packed))
        if not node.lock_ref:
            node.unlink()

    def _count_out(self, payer: Payer, pages: int) -> None:
        self.cached_pages -= pages
        payer.pages -= pages
        self.lines.changed(payer)

    def _payer(self, node: TreeNode) -> Payer:
        return self.lines.payer(node.payer.name)


def _host_pages(node: TreeNode) -> int:
    return len(node.host_pages) // INDEX_BYTES
