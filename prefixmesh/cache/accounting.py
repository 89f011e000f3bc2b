"""Who holds which device pages of a cache, who locks them, and who goes next: the part that every kind of cache shares.

A cache decides *where* KV belongs (radix tree, hash chain); this keeps the books: pages cached and protected, lock counts along
paths, the payers' lines, and the nodes that a flush has cut off while somebody still reads them. Counts change where nodes
change, so that asking for them is O(1).

``lock``, ``release`` and ``touch`` are the hot ones: each is one loop up a path, without a call but that of a line's C method.
"""

from collections.abc import Mapping

from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.eviction import EvictionPolicy, LruLine
from prefixmesh.cache.host_tier import HostTier
from prefixmesh.cache.node import INDEX_BYTES, NO_CHILDREN, TreeNode, nodes_below, unpack_pages
from prefixmesh.cache.owners import NOBODY, OwnerLines, Payer, Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import DoubleReleaseError, InternalError
from prefixmesh.tokens import TOKEN_BYTES

NO_QUOTAS: Mapping[str, Quota] = {}


class PageAccounts:
    """The books of one cache: its root, its counts, its locks, its order."""

    def __init__(
        self,
        allocator: PageAllocator,
        policy: EvictionPolicy = "lru",
        quotas: Mapping[str, Quota] = NO_QUOTAS,
        host: HostTier | None = None,
    ) -> None:
        self.allocator = allocator
        self.host = host
        """The second tier; None when there is none."""
        self.lines = OwnerLines(policy, quotas, _device_pages, "serial", "lock_ref", "has_device_children")
        line = LruLine()
        line.refresh = self._free_detached
        self.gone = Payer("(cut off by a flush)", line, Quota())
        """Whose account cut-off nodes are on: a last use in its line, which their last release is, frees them."""
        self.root = self._make_root()
        self.cached_pages = 0
        """Device pages of all nodes, cut-off ones among them."""
        self.protected_pages = 0
        """Those of them that a lock protects."""
        self.node_count = 0
        """Nodes in the tree, its root and detached ones left out."""
        self.double_releases = 0
        """Receipts that somebody tried to release again: bugs survived."""
        self.serial = 0
        """Number of the last operation that used anything."""
        self.detached: dict[int, TreeNode] = {}
        """After a flush: the page of a still locked node -> that node. Bounded by what was locked; gone when released."""

    @property
    def evictable_pages(self) -> int:
        """Device pages that ``NOBODY`` in particular could have: unlocked and not below a payer's floor. O(floors)."""
        return self.cached_pages - self.protected_pages - self.lines.sheltered_from(NOBODY)

    def evictable_for(self, owner: str) -> int:
        """Device pages that ``owner`` could have. Exact unless a sheltered node hangs below another payer's, whose pages are
        counted and cannot go. O(floors)."""
        return self.cached_pages - self.protected_pages - self.lines.sheltered_from(owner)

    def adopt(self, node: TreeNode) -> None:
        """Enter a new, unlocked leaf and its pages; its path must be touched next, to stand behind it in line. O(1)."""
        assert node.parent is not None
        node.parent.add_child(node)
        self.node_count += 1
        pages = len(node.pages) // INDEX_BYTES
        self.cached_pages += pages
        payer = node.payer
        payer.pages += pages
        payer.line.enter(node)
        if payer.watched:
            self.lines.changed(payer)

    def attach(self, node: TreeNode, packed: bytes) -> None:
        """Give a node that was on the host alone its device pages. Its children on the device must have entered before, and
        its path must be touched, or locked and released, next. O(1)."""
        assert node.parent is not None
        node.parent.host_only_children -= 1
        node.pages = packed
        node.payer = payer = self.lines.payer(node.payer.name)
        node.serial = self.serial
        pages = len(packed) // INDEX_BYTES
        self.cached_pages += pages
        payer.pages += pages
        payer.line.enter(node)
        self.lines.changed(payer)

    def split(self, node: TreeNode, key_bytes: int, pages: int, lower_edge: bytes, blocks: int) -> TreeNode:
        """Cut ``node``'s edge after ``key_bytes``, ``pages`` pages and ``blocks`` fingerprints; returns the new upper half,
        whose path must be touched next, to stand behind it in line. O(length of the edge).

        The old object keeps the tail, and with it every handle and receipt; the new one takes over what protects and what
        dates it, because whoever uses the tail uses its front. Indices are copied: a view would keep the whole edge's
        alive for as long as either half lives.
        """
        parent = node.parent
        assert parent is not None
        upper = TreeNode(
            parent, node.edge, node.key[:key_bytes], b"", node.creation_time, node.payer, node.start
        )
        upper.last_access_time = node.last_access_time
        upper.serial = node.serial
        upper.hit_count = node.hit_count
        upper.priority = node.priority
        upper.lock_ref = node.lock_ref
        upper.pin_ref = node.pin_ref
        upper.host_pin_ref = node.host_pin_ref
        upper.hash_value = node.hash_value[:blocks]
        upper.children = {lower_edge: node}
        upper.host_only_children = 0 if node.pages else 1
        upper.host_children = 1 if node.host_pages else 0
        parent.children[node.edge] = upper
        node.parent = upper
        node.edge = lower_edge
        node.key = node.key[key_bytes:]
        node.start += key_bytes // TOKEN_BYTES
        node.hash_value = node.hash_value[blocks:]
        self.node_count += 1
        if node.pages:
            upper.pages = node.pages[: pages * INDEX_BYTES]
            node.pages = node.pages[pages * INDEX_BYTES :]
            if not node.lock_ref:
                node.payer.line.enter(upper)
        if node.host_pages and self.host is not None:
            self.host.split(node, upper, pages)
        return upper

    def touch(self, node: TreeNode, now: float, hits: int) -> None:
        """Note a use of the path from ``node`` to the root. O(depth)."""
        self.serial = serial = self.serial + 1
        if self.host is not None and self.host.cached_pages:
            self._touch_tiers(self.host, node, now, hits)
            return
        while (parent := node.parent) is not None:
            node.last_access_time = now
            node.serial = serial
            node.hit_count += hits
            if not node.lock_ref:
                line = node.payer.line
                try:
                    line.refresh(node)
                except KeyError:
                    line.put_last(node)
            node = parent

    def _touch_tiers(self, host: HostTier, node: TreeNode, now: float, hits: int) -> None:
        while (parent := node.parent) is not None:
            node.last_access_time = now
            node.hit_count += hits
            if node.pages and not node.lock_ref:
                node.serial = self.serial
                node.payer.line.put_last(node)
            host.touch(node, self.serial)
            node = parent

    def reorder(self, node: TreeNode) -> None:
        """As ``touch``, but for the eviction order alone: neither a hit nor a time is noted. O(depth)."""
        self.serial += 1
        self.touch_device_path(node)
        if self.host is not None:
            self.host.touch_path(node, self.serial)

    def touch_device_path(self, node: TreeNode) -> None:
        """Put the evictable nodes of a path at the back of the device's lines, as used by the operation that is on. O(depth)."""
        at = node
        while (parent := at.parent) is not None:
            if at.pages and not at.lock_ref:
                at.serial = self.serial
                at.payer.line.put_last(at)
            at = parent

    def raise_priority(self, node: TreeNode, priority: int) -> None:
        """Let the path have at least this priority; its path must be touched next. O(nodes that rise): the priority of a
        parent is never below its child's."""
        while node.parent is not None and node.priority < priority:
            node.priority = priority
            node = node.parent

    def lock(self, node: TreeNode) -> LockReceipt:
        """Protect the device pages on the path from ``node`` to the root. O(depth).

        Raises InternalError when the node is not (or no longer) on the device in this cache: a match must be locked before
        anything is evicted.
        """
        if (node.parent is None or not node.pages) and node is not self.root:
            raise InternalError(f"cannot lock {node!r}: it is not in this cache, or not on the device")
        receipt = LockReceipt(node)
        node.receipts += 1
        protected = 0
        while (parent := node.parent) is not None:
            if not node.lock_ref:
                protected += len(node.pages)
                if node.payer.floor:
                    node.payer.locked_pages += len(node.pages) // INDEX_BYTES
            node.lock_ref += 1
            node = parent
        node.lock_ref += 1
        self.protected_pages += protected // INDEX_BYTES
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
        self.serial = serial = self.serial + 1
        protected = 0
        while (parent := node.parent) is not None:
            node.lock_ref -= 1
            if not node.lock_ref:
                protected += len(node.pages)
                node.serial = serial
                payer = node.payer
                if payer.floor:
                    payer.locked_pages -= len(node.pages) // INDEX_BYTES
                try:
                    payer.line.refresh(node)
                except KeyError:
                    payer.line.put_last(node)
            node = parent
        node.lock_ref -= 1
        self.protected_pages -= protected // INDEX_BYTES

    def drop(self, node: TreeNode) -> bytes:
        """Take an unlocked leaf that is on the device alone out of the tree; returns its pages, packed, for the caller to
        free. O(1)."""
        assert node.children is NO_CHILDREN
        assert not node.host_pages
        assert not node.lock_ref
        packed = node.pages
        payer = node.payer
        payer.line.leave(node)
        self.node_count -= 1
        self._count_out(payer, len(packed) // INDEX_BYTES)
        node.unlink()
        return packed

    def demote(self, node: TreeNode) -> bytes:
        """Take an unlocked node's device pages away, its host copy staying; returns them, packed, for the caller to free.
        O(1)."""
        assert not node.lock_ref
        assert node.parent is not None
        node.parent.host_only_children += 1
        packed = node.pages
        node.payer.line.leave(node)
        node.pages = b""
        self._count_out(node.payer, len(packed) // INDEX_BYTES)
        return packed

    def trim(self, node: TreeNode, pages: int, key_bytes: int, blocks: int) -> bytes:
        """Cut an unlocked leaf that is on the device alone to ``key_bytes`` and ``blocks`` fingerprints, which is ``pages``
        pages less; returns those, packed, for the caller to free. O(length of the edge)."""
        assert node.children is NO_CHILDREN
        assert not node.lock_ref
        kept = len(node.pages) - pages * INDEX_BYTES
        tail = node.pages[kept:]
        node.key = node.key[:key_bytes]
        node.pages = node.pages[:kept]
        node.hash_value = node.hash_value[:blocks]
        self._count_out(node.payer, pages)
        return tail

    def forget(self, node: TreeNode) -> None:
        """Take a leaf out of the tree that no tier holds any more. O(1)."""
        assert node.children is NO_CHILDREN
        assert node.parent is not None
        node.parent.host_only_children -= 1
        self.node_count -= 1
        node.unlink()

    def _count_out(self, payer: Payer, pages: int) -> None:
        self.cached_pages -= pages
        payer.pages -= pages
        if payer.watched or not payer.pages:
            self.lines.changed(payer)

    def detach_all(self) -> None:
        """Start again from an empty tree. Unlocked pages are free at once; locked nodes stay readable, outside the tree,
        until their receipts are released. O(nodes)."""
        nodes = [node for _, node in nodes_below(self.root)]
        freed: list[bytes] = []
        for node in nodes:
            node.payer = self.gone
            if node.lock_ref:
                self.detached.update(dict.fromkeys(node.value.tolist(), node))
            else:
                freed.append(node.pages)
                node.pages = b""
        if self.host is not None:
            self.host.detach_all(nodes)
        for node in nodes:
            if not node.lock_ref and not node.host_ref_counter:
                node.unlink()
        self.lines.clear()
        self.root = self._make_root()
        self.cached_pages = self.protected_pages
        self.node_count = 0
        self.allocator.free(unpack_pages(b"".join(freed)))

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

    def _free_detached(self, node: TreeNode) -> None:
        """The last lock of a cut-off node has gone."""
        pages, node.pages = node.value, b""
        for page in pages.tolist():
            if self.detached.pop(page, None) is not node:
                raise InternalError(f"page {page} of {node!r} is not known as cut off by a flush")
        self.cached_pages -= len(pages)
        if not node.host_ref_counter:
            node.unlink()
        self.allocator.free(pages)

    def _make_root(self) -> TreeNode:
        """A node that stands for the empty prefix: it holds no page and is never evicted."""
        return TreeNode(None, b"", b"", b"", 0.0, self.gone)


def _device_pages(node: TreeNode) -> int:
    return len(node.pages) // INDEX_BYTES
