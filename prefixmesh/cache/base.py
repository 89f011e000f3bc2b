"""What a worker's scheduler asks of a prefix cache, and what it gets back.

Three caches stand behind the one interface: ``RadixCache`` (any common prefix), ``HashCache`` (whole 16-token blocks) and
``NoCache`` (nothing). A cache owns KV *pages by index*; it never sees KV. It takes pages from, and gives them back to, the
``PageAllocator`` it was made with.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.receipts import LockReceipt as LockReceipt
from prefixmesh.ids import Namespace

PageIndices = npt.NDArray[np.int32]
"""Indices of pages in the KV pool, in token order, int32."""


class RadixKey(NamedTuple):
    """What is looked up: packed tokens within a namespace. Equal tokens in two namespaces never meet.

    With a boundary, the tokens before it live in a public namespace and the rest in the caller's own below it (``public``)::

        tokens:     | 0 ..... boundary_tokens | ...... end |
        lives in:   | namespace (public)      | tail       |
    """

    namespace: Namespace
    tokens: bytes
    """Packed little-endian uint32 (``prefixmesh.tokens``)."""
    boundary_tokens: int = 0
    """Where the public part ends: whole pages and whole blocks; 0 when all is the caller's own."""
    tail: Namespace = Namespace(b"")
    """The namespace after the boundary, from ``namespace.tail_namespace``."""


class MatchResult(NamedTuple):
    """The longest cached prefix of a key."""

    device_indices: PageIndices
    """Pages that hold the matched tokens' KV, in order; read-only, and right whatever becomes of the cache. Whole pages only."""

    matched_tokens: int
    """``len(device_indices) * page_size``."""

    last_device_node: TreeNode
    """Where the device's match ends: what ``lock`` takes."""

    last_host_node: TreeNode
    """Where the whole match ends; the same node when the host has nothing that the device has not."""

    host_hit_length: int
    """Tokens beyond ``matched_tokens`` that only the host holds: what a restore would bring."""


class TierTokens(NamedTuple):
    """How many tokens of a key each tier would give."""

    device: int
    host: int
    """Beyond the device's."""


class InsertResult(NamedTuple):
    """What an insert found already there."""

    prefix_tokens: int
    """Tokens of the key that were on the device before this insert."""

    inserted_tokens: int
    """Tokens of the key that are cached now: the key cut to whole pages (or blocks). 0 when nothing is kept."""

    device_indices: PageIndices
    """The pages that hold the first ``inserted_tokens`` tokens now; read-only. The caller puts them in its page table before anything
    else is allocated: where its own page was a duplicate, that page is free already."""

    last_device_node: TreeNode
    """Where the inserted key ends: what ``lock`` takes."""


class PrefixCache(Protocol):
    """A cache of prompt prefixes on one worker. Not thread-safe: one loop owns it."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def evictable_pages(self) -> int:
        """Cached pages that an eviction for nobody in particular could free: nothing locks them, and no floor keeps them."""
        ...

    @property
    def protected_pages(self) -> int:
        """All other cached pages, and pages cut off by a flush whose receipts are still out."""
        ...

    @property
    def double_releases(self) -> int:
        """Receipts that somebody tried to release again; only rises."""
        ...

    def match_prefix(self, key: RadixKey, now: float, priority: int = 0) -> MatchResult:
        """Longest cached prefix of ``key``. Splits an edge where the match ends inside it, and is a use of its path, by a
        user of this priority."""
        ...

    def peek(self, key: RadixKey) -> int:
        """Tokens that ``match_prefix`` would match; changes nothing."""
        ...

    def insert(
        self, key: RadixKey, pages: PageIndices, now: float, *, priority: int = 0, owner: str = ""
    ) -> InsertResult:
        """Cache ``key``, whose KV is complete in ``pages`` (``pages[i]`` holds tokens ``i*page_size`` onwards). What is new is
        on ``owner``'s account; what the host had already stays on the account it was on.

        Takes ownership of the pages it keeps, and of the caller's duplicates, which it frees: pages for tokens that were cached
        already in other pages. Pages that the cache already owns (from an earlier match or insert) are passed again and
        recognised. Pages beyond ``inserted_tokens`` stay the caller's: its own begin, from then on, at the greater of
        ``inserted_tokens // page_size`` and where they began before.

        After a flush, a request may still hold pages that the flush cut off and its receipt keeps readable. They never
        enter the new tree: nothing is kept (``inserted_tokens`` 0), and ``last_device_node`` is the cut-off node, so that
        locking it before releasing the old receipt is right here as everywhere.
        """
        ...

    def lock(self, node: TreeNode) -> LockReceipt:
        """Protect ``node`` and all its ancestors from eviction until the receipt is released."""
        ...

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock. Raises DoubleReleaseError, changing nothing, when the receipt was released before."""
        ...

    def evictable_for(self, owner: str) -> int:
        """Of the evictable pages, those that ``evict`` would free for this owner."""
        ...

    def evict(self, pages: int, owner: str = "") -> int:
        """Free ``pages`` pages of what is unlocked, for ``owner``, in the policy's order (more only where what is kept is larger
        than a page); returns how many were freed, which is less when not enough may go."""
        ...

    def flush(self) -> None:
        """Forget everything: unlocked pages are free at once, locked ones when their receipts are released."""
        ...

    def check_invariants(self) -> None:
        """Recompute every count from nothing; raises InvariantError with the state printed. O(size)."""
        ...
