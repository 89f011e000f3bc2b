"""Who holds which pages of a cache, who locks them, and who goes next: the part that every kind of cache shares.

A cache decides *where* KV belongs (radix tree, hash chain); this keeps the books: pages evictable and protected, lock counts
along paths, the eviction order, and the nodes that a flush has cut off while somebody still reads them. Counts change where
nodes change, so that asking for them is O(1).
"""

import numpy as np

from prefixmesh.cache.base import CacheNode, PageIndices
from prefixmesh.cache.eviction import EvictionOrder
from prefixmesh.cache.node import TreeNode, make_root, nodes_below
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import DoubleReleaseError, InternalError


class PageAccounts:
    """The books of one cache: its root, its counts, its locks, its order."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.root = make_root()
        self.order = EvictionOrder()
        self.evictable_pages = 0
        self.protected_pages = 0
        self.node_count = 0
        """Nodes in the tree, its root and detached ones left out."""
        self.double_releases = 0
        """Receipts that somebody tried to release again: bugs survived."""
        self.detached: dict[int, TreeNode] = {}
        """After a flush: the page of a still locked node -> that node. Bounded by what was locked; gone when released."""

    def adopt(self, node: TreeNode) -> None:
        """Enter a new, unlocked leaf and its pages; its path must be touched next, to stand behind it in line. O(1)."""
        assert node.parent is not None
        node.parent.children[node.edge] = node
        self.evictable_pages += len(node.value)
        self.node_count += 1
        self.order.add(node)

    def split(self, node: TreeNode, key_bytes: int, pages: int, lower_edge: bytes) -> TreeNode:
        """Cut ``node``'s edge after ``key_bytes``; returns the new upper half, whose path must be touched next, to stand
        behind it in line. O(length of the edge).

        The old object keeps the tail, and with it every handle and receipt; the new one takes over what protects and what
        dates it, because whoever uses the tail uses its front. Both index arrays are copies: a view would keep the whole
        edge's indices alive for as long as either half lives.
        """
        parent = node.parent
        assert parent is not None
        upper = TreeNode(
            parent, node.edge, node.key[:key_bytes], node.value[:pages].copy(), node.creation_time
        )
        upper.lock_ref = node.lock_ref
        upper.last_access_time = node.last_access_time
        upper.hit_count = node.hit_count
        upper.children[lower_edge] = node
        parent.children[node.edge] = upper
        node.parent = upper
        node.edge = lower_edge
        node.key = node.key[key_bytes:]
        node.value = node.value[pages:].copy()
        self.node_count += 1
        if not upper.lock_ref:
            self.order.add(upper)
        return upper

    def touch(self, node: TreeNode, now: float, hits: int) -> None:
        """Note a use of the path from ``node`` to the root. O(depth)."""
        refresh = self.order.refresh
        while (parent := node.parent) is not None:
            node.last_access_time = now
            node.hit_count += hits
            if not node.lock_ref:
                refresh(node)
            node = parent

    def lock(self, node: CacheNode) -> LockReceipt:
        """Protect the path from ``node`` to the root. O(depth).

        Raises InternalError when the node is not (or no longer) of this cache: a match must be locked before anything is
        evicted.
        """
        if not isinstance(node, TreeNode) or (node.parent is None and node is not self.root):
            raise InternalError(f"cannot lock {node!r}: it is not in this cache")
        receipt = LockReceipt(node)
        node.receipts += 1
        while (parent := node.parent) is not None:
            if not node.lock_ref:
                pages = len(node.value)
                self.evictable_pages -= pages
                self.protected_pages += pages
                self.order.remove(node)
            node.lock_ref += 1
            node = parent
        node.lock_ref += 1
        return receipt

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock along the path it took, which may have been split since. O(depth).

        Raises DoubleReleaseError, changing only the counter, when the receipt was used before.
        """
        node = receipt.node
        if node is None:
            self.double_releases += 1
            raise DoubleReleaseError("a lock receipt was released twice")
        receipt.node = None
        node.receipts -= 1
        while (parent := node.parent) is not None:
            node.lock_ref -= 1
            if not node.lock_ref:
                self._unprotect(node)
            node = parent
        node.lock_ref -= 1

    def _unprotect(self, node: TreeNode) -> None:
        pages = node.value
        self.protected_pages -= len(pages)
        if self.detached and int(pages[0]) in self.detached:
            for page in pages.tolist():
                del self.detached[page]
            self._unlink(node)
            self.allocator.free(pages)
            return
        self.evictable_pages += len(pages)
        self.order.add(node)

    def drop(self, node: TreeNode) -> PageIndices:
        """Take an unlocked leaf out of the tree; returns its pages, for the caller to free. O(1)."""
        assert not node.children
        assert not node.lock_ref
        self.order.remove(node)
        self.evictable_pages -= len(node.value)
        self.node_count -= 1
        self._unlink(node)
        return node.value

    def trim(self, node: TreeNode, pages: int, page_bytes: int) -> PageIndices:
        """Cut ``pages`` pages off an unlocked leaf's end; returns them, for the caller to free. O(length of the edge)."""
        assert not node.children
        assert not node.lock_ref
        kept = len(node.value) - pages
        tail = node.value[kept:]
        node.key = node.key[: kept * page_bytes]
        node.value = node.value[:kept].copy()
        self.evictable_pages -= pages
        return tail

    def detach_all(self) -> None:
        """Start again from an empty tree. Unlocked pages are free at once; locked nodes stay readable, outside the tree,
        until their receipts are released. O(nodes)."""
        nodes = [node for _, node in nodes_below(self.root)]
        unlocked = [node for node in nodes if not node.lock_ref]
        for node in nodes:
            if node.lock_ref:
                self.detached.update(dict.fromkeys(node.value.tolist(), node))
        for node in unlocked:
            self._unlink(node)
        self.root = make_root()
        self.order.clear()
        self.evictable_pages = 0
        self.node_count = 0
        if unlocked:
            self.allocator.free(np.concatenate([node.value for node in unlocked]))

    def detached_end(self, pages: PageIndices) -> TreeNode | None:
        """The deepest node cut off by a flush that owns a leading run of ``pages``; None when their first page is not such
        a node's. O(1) unless it is."""
        if not self.detached or not len(pages):
            return None
        end: TreeNode | None = None
        for page in pages.tolist():
            node = self.detached.get(page)
            if node is None:
                break
            end = node
        return end

    @staticmethod
    def _unlink(node: TreeNode) -> None:
        """Leave the parent; also what makes a stale handle recognisable."""
        if node.parent is not None:
            del node.parent.children[node.edge]
            node.parent = None
