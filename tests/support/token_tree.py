"""The least a tree must do for its pins: a radix tree over packed tokens with splits and locks, without a pool, times or order."""

from typing import Any, Final

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, nodes_below
from prefixmesh.cache.pins import Held, PinBudget, PinTable
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.tokens import TOKEN_BYTES, unpack

Prefix = tuple[bytes, tuple[int, ...]]
"""Namespace and tokens, whole pages."""

NOBODY_PAYS: Final[Any] = None


class TokenTree:
    """Implements ``PinnedTree``, and calls its ``pins`` as a cache does."""

    def __init__(self, page_size: int = 1, budget: PinBudget | None = None) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.root = self._node(None, b"", b"")
        self.calls: list[str] = []
        self.pins = PinTable(self, budget or PinBudget())

    def can_hold(self, key: RadixKey) -> bool:
        return key.boundary_tokens % self.page_size == 0

    def hold(self, key: RadixKey) -> Held:
        """Walk, split, lock."""
        self.calls.append("hold")
        node, at = self._end(key)
        receipt = LockReceipt(node)
        node.receipts += 1
        for above in path(node):
            above.lock_ref += 1
        going_on = None if at == len(key.tokens) else self._name(node, key, at)
        return Held(node, receipt, at // TOKEN_BYTES, going_on)

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock."""
        self.calls.append("release")
        node = receipt.node
        assert node is not None, "released twice"
        receipt.node = None
        node.receipts -= 1
        for above in path(node):
            above.lock_ref -= 1

    def insert(self, key: RadixKey, now: float = 0.0) -> None:
        """Cache ``key`` cut to whole pages."""
        if now >= self.pins.next_expiry:
            self.pins.expire(now)
        node, at = self._end(key)
        whole = len(key.tokens) // self.page_bytes * self.page_bytes
        if at < whole:
            leaf = self._node(node, self._name(node, key, at), key.tokens[at:whole])
            node.add_child(leaf)
            if self.pins.waiting:
                self.pins.grown(node, leaf.edge)

    def evict(self, pages: int = 1_000_000) -> None:
        """Drop so many pages that nothing locks, off the ends of leaves."""
        while pages and (leaves := [node for _, node in nodes_below(self.root) if is_free_leaf(node)]):
            leaf = leaves[0]
            dropped = min(pages, len(leaf.value))
            pages -= dropped
            if dropped == len(leaf.value):
                leaf.unlink()
            else:
                leaf.pages = leaf.pages[: -dropped * INDEX_BYTES]
                leaf.key = leaf.key[: -dropped * self.page_bytes]

    def flush(self) -> None:
        """Forget everything; only pins lock anything here, so nothing is locked then."""
        self.pins.let_go()
        assert not any(node.lock_ref or node.pin_ref for _, node in nodes_below(self.root))
        self.root = self._node(None, b"", b"")
        self.pins.hold_again()

    def cached(self) -> set[Prefix]:
        """Every cached prefix that ends with a page."""
        found: set[Prefix] = set()
        for _, node in nodes_below(self.root):
            above = list(path(node))[::-1][1:]
            tokens = tuple(unpack(b"".join(part.key for part in above)).tolist())
            namespace = above[0].edge[: -self.page_bytes]
            for end in range(len(tokens), len(tokens) - len(node.value) * self.page_size, -self.page_size):
                found.add((namespace, tokens[:end]))
        return found

    def pinned(self) -> int:
        """Pages of nodes that say that a pin protects them."""
        return sum(len(node.value) for _, node in nodes_below(self.root) if node.pin_ref)

    def _name(self, node: TreeNode, key: RadixKey, at: int) -> bytes:
        edge = key.tokens[at : at + self.page_bytes]
        return key.namespace + edge if node is self.root else edge

    def _end(self, key: RadixKey) -> tuple[TreeNode, int]:
        """The node at which the cached part of ``key`` ends, made by a split where it must be, and the bytes up to there."""
        node, at = self.root, 0
        while (child := node.children.get(self._name(node, key, at))) is not None:
            shared = 0
            step = self.page_bytes
            while (
                shared < len(child.key)
                and child.key[shared : shared + step] == key.tokens[at + shared :][:step]
            ):
                shared += step
            node = child if shared == len(child.key) else self._split(child, shared)
            at += shared
        return node, at

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """The new upper half; the old object keeps the end."""
        parent, pages = node.parent, at // self.page_bytes
        assert parent is not None
        upper = self._node(parent, node.edge, node.key[:at])
        upper.lock_ref, upper.pin_ref = node.lock_ref, node.pin_ref
        parent.add_child(upper)
        node.parent, node.edge = upper, node.key[at : at + self.page_bytes]
        node.key, node.pages = node.key[at:], node.pages[pages * INDEX_BYTES :]
        upper.add_child(node)
        return upper

    def _node(self, parent: TreeNode | None, edge: bytes, key: bytes) -> TreeNode:
        return TreeNode(parent, edge, key, bytes(len(key) // self.page_bytes * INDEX_BYTES), 0.0, NOBODY_PAYS)


def path(node: TreeNode | None) -> list[TreeNode]:
    """``node`` and all above it, the root too."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes


def is_free_leaf(node: TreeNode) -> bool:
    """Whether it may be evicted."""
    return not node.children and not node.lock_ref
