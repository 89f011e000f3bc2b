"""The radix prefix cache: a tree over packed tokens that finds *any* common prefix, cut to whole pages.

An edge is a run of whole pages; a node holds the indices of the pages with its KV, never KV. A node's children are found by
the bytes of their first page, so two edges that leave a node differ within their first page, and a walk does one dictionary
look-up and one memory comparison per node, however long its edge. At the root the namespace stands before the first page's
bytes: equal tokens of two namespaces never share a node.
"""

from typing import NamedTuple

import numpy as np

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import CacheNode, InsertResult, MatchResult, PageIndices, RadixKey
from prefixmesh.cache.drawing import draw
from prefixmesh.cache.invariants import broken_rule, check_accounts, owned_pages, summary
from prefixmesh.cache.node import NO_PAGES, TreeNode, nodes_below
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import ConfigError, InternalError
from prefixmesh.tokens import TOKEN_BYTES


class _Walk(NamedTuple):
    """How far a key leads into the tree."""

    node: TreeNode
    """The last node whose whole edge the key contains."""

    values: list[PageIndices]
    """Page indices of all that matched, in order: of each node on the way, and of ``inside`` as far as it is shared. They
    are the tree's own arrays or views of them: for joining, not for keeping."""

    key_bytes: int
    """Bytes of the key that matched: whole pages."""

    inside: TreeNode | None
    """The child in whose edge the key leaves the tree; None when it leaves at ``node``."""

    inside_bytes: int
    """Bytes of ``inside``'s edge that the key shares: at least one page, and not all; 0 without ``inside``."""


class RadixCache:
    """Prefix cache with edges of any length. Implements ``PrefixCache``; not thread-safe.

    * look up: ``match_prefix``, ``peek``
    * keep: ``insert``, ``lock``, ``release``
    * give up: ``evict``, ``flush``
    * look at: ``evictable_pages``, ``protected_pages``, ``owned_pages``, ``render``, ``check_invariants``
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {page_size}")
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._accounts = PageAccounts(allocator)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def evictable_pages(self) -> int:
        """Cached pages that nothing locks. O(1)."""
        return self._accounts.evictable_pages

    @property
    def protected_pages(self) -> int:
        """Pages that a lock protects, those cut off by a flush and still read among them. O(1)."""
        return self._accounts.protected_pages

    @property
    def double_releases(self) -> int:
        """Receipts that somebody tried to release again."""
        return self._accounts.double_releases

    @property
    def node_count(self) -> int:
        """Nodes in the tree. O(1)."""
        return self._accounts.node_count

    def match_prefix(self, key: RadixKey, now: float) -> MatchResult:
        """Longest cached prefix of ``key``, in whole pages; O(depth) look-ups and O(matched) bytes.

        Splits the edge in which the match ends, so that exactly the match can be locked, and counts as a use of its path.
        Locks nothing: lock ``last_device_node`` before anything else may evict.
        """
        walk = self._walk(key)
        indices = _join(walk.values)
        node = self._end(walk)
        self._accounts.touch(node, now, 1)
        return MatchResult(indices, len(indices) * self._page_size, node)

    def peek(self, key: RadixKey) -> int:
        """Tokens that ``match_prefix`` would match; neither splits nor touches. Same cost."""
        walk = self._walk(key)
        return walk.key_bytes // TOKEN_BYTES

    def insert(self, key: RadixKey, pages: PageIndices, now: float) -> InsertResult:
        """Cache ``key`` cut to whole pages; see ``PrefixCache.insert`` for who owns which page afterwards.

        O(depth) look-ups and O(length) bytes. Raises InternalError, changing nothing, when ``pages`` is
        shorter than the key or one of the duplicates it would free is free already.
        """
        wanted = len(key.tokens) // self._page_bytes
        if len(pages) < wanted:
            raise InternalError(f"insert of {wanted} pages of tokens with {len(pages)} pages of KV")
        cut_off = self._accounts.detached_end(pages)
        if cut_off is not None:
            return InsertResult(0, 0, NO_PAGES, cut_off)
        walk = self._walk(key)
        # key:    | cached: in the tree already      | new: a leaf below node       | short of a page: not kept
        # pages:  0 ..................... cached-1   cached ............ wanted-1   wanted ...
        # owner:  the tree's own, or a duplicate     the caller's, now the tree's   the caller's still
        cached = walk.key_bytes // self._page_bytes
        fresh = np.array(pages[cached:wanted], dtype=np.int32)
        indices = _join([*walk.values, fresh] if len(fresh) else walk.values)
        self._free_duplicates(pages[:cached], indices[:cached])
        node = self._end(walk)
        if len(fresh):
            start = cached * self._page_bytes
            edge = key.tokens[start : start + self._page_bytes]
            if node is self._accounts.root:
                edge = key.namespace + edge
            node = TreeNode(node, edge, key.tokens[start : wanted * self._page_bytes], fresh, now)
            self._accounts.adopt(node)
        self._accounts.touch(node, now, 0)
        return InsertResult(cached * self._page_size, wanted * self._page_size, indices, node)

    def lock(self, node: CacheNode) -> LockReceipt:
        """Protect ``node`` and its ancestors until the receipt is released. O(depth)."""
        return self._accounts.lock(node)

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock; raises DoubleReleaseError, changing nothing, the second time. O(depth)."""
        self._accounts.release(receipt)

    def evict(self, pages: int) -> int:
        """Free exactly ``pages`` pages, or all that is unlocked when that is less; returns how many.

        Least recently used leaves first; a parent follows once it is a leaf; the last leaf is cut from its end rather than
        dropped whole. O(nodes dropped + length of the last one), however many there are.
        """
        accounts = self._accounts
        given_up: list[PageIndices] = []
        freed = 0
        while freed < pages and (node := accounts.order.first()) is not None:
            missing = pages - freed
            if len(node.value) > missing:
                part = accounts.trim(node, missing, self._page_bytes)
            else:
                part = accounts.drop(node)
            freed += len(part)
            given_up.append(part)
        if given_up:
            accounts.allocator.free(given_up[0] if len(given_up) == 1 else np.concatenate(given_up))
        return freed

    def flush(self) -> None:
        """Forget everything: unlocked pages are free at once, locked ones when their receipts are released. O(nodes)."""
        self._accounts.detach_all()

    def owned_pages(self) -> PageIndices:
        """Every page this cache owns, in no order. O(pages)."""
        return owned_pages(self._accounts)

    def check_invariants(self) -> None:
        """Recompute every count from nothing; raises InvariantError with the tree drawn. O(nodes + pages)."""
        check_accounts("RadixCache", self._accounts, self._page_bytes)
        for depth, node in nodes_below(self._accounts.root):
            name = node.edge if depth > 1 else node.edge[-self._page_bytes :]
            if name != node.key[: self._page_bytes]:
                raise broken_rule(
                    "RadixCache", "edges", f"{node} is not found by its first page", self._accounts
                )

    def render(self) -> str:
        """The tree as text: lengths, pages, locks. Tokens are not shown."""
        return draw(self._accounts)

    def __repr__(self) -> str:
        return f"RadixCache(page_size={self._page_size}, {summary(self._accounts)})"

    def _walk(self, key: RadixKey) -> _Walk:
        """Follow ``key`` as far as the tree goes; changes nothing."""
        namespace, tokens = key
        page_bytes = self._page_bytes
        node = self._accounts.root
        values: list[PageIndices] = []
        position = 0
        # A key shorter than a page finds no child anywhere: children are known by whole pages, so no shorter name is equal.
        child = node.children.get(namespace + tokens[:page_bytes]) if len(tokens) >= page_bytes else None
        while child is not None:
            edge = child.key
            if not tokens.startswith(edge, position):
                shared_pages = _shared_bytes(edge, tokens, position) // page_bytes
                shared = shared_pages * page_bytes
                values.append(child.value[:shared_pages])
                return _Walk(node, values, position + shared, child, shared)
            node = child
            values.append(child.value)
            position += len(edge)
            child = child.children.get(tokens[position : position + page_bytes])
        return _Walk(node, values, position, None, 0)

    def _end(self, walk: _Walk) -> TreeNode:
        """The node at which the walk ends, made by a split when that is inside an edge. The path must be touched next."""
        child = walk.inside
        if child is None:
            return walk.node
        shared = walk.inside_bytes
        lower_edge = child.key[shared : shared + self._page_bytes]
        return self._accounts.split(child, shared, shared // self._page_bytes, lower_edge)

    def _free_duplicates(self, pages: PageIndices, indices: PageIndices) -> None:
        """Give back those of the caller's ``pages`` that the tree has in other pages (``indices``) already."""
        differs = pages != indices
        if np.count_nonzero(differs):
            self._accounts.allocator.free(np.asarray(pages[differs], dtype=np.int32))


def _join(values: list[PageIndices]) -> PageIndices:
    """One new array of all indices, which the receiver may keep and write to."""
    if len(values) == 1:
        return values[0].copy()
    return np.concatenate(values) if values else NO_PAGES


def _shared_bytes(edge: bytes, tokens: bytes, start: int) -> int:
    """Bytes of ``edge`` that ``tokens[start:]`` begins with, in whole tokens. O(shorter of the two), at C speed."""
    count = min(len(edge), len(tokens) - start) // TOKEN_BYTES
    ours = np.frombuffer(edge, dtype=np.uint32, count=count)
    theirs = np.frombuffer(tokens, dtype=np.uint32, count=count, offset=start)
    differs = ours != theirs
    first = int(differs.argmax())
    return (first if differs[first] else count) * TOKEN_BYTES
