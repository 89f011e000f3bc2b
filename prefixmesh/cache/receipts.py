"""Receipts: what a lock gives and a release takes, once.

A receipt and not a counter, because "release what I locked" cannot then be said twice by two code paths that both believe
the request is theirs to end.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixmesh.cache.node import TreeNode


class LockReceipt:
    """Proof of one lock; good for one release, also after splits and after a flush."""

    __slots__ = ("node",)

    def __init__(self, node: "TreeNode") -> None:
        self.node: TreeNode | None = node
        """The end of the locked path, for the cache alone; None once released."""

    @property
    def released(self) -> bool:
        """Whether it has been used."""
        return self.node is None

    def __repr__(self) -> str:
        return f"LockReceipt({'released' if self.node is None else self.node})"
