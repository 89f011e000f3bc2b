"""The cache that keeps nothing: what ``--prefix-cache off`` puts behind the same interface."""

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import InsertResult, MatchResult, PageIndices, RadixKey
from prefixmesh.cache.invariants import check_accounts, owned_pages, summary
from prefixmesh.cache.node import NO_PAGES, TreeNode
from prefixmesh.cache.owners import NOBODY
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import ConfigError
from prefixmesh.tokens import TOKEN_BYTES


class NoCache:
    """Matches nothing and keeps nothing. Implements ``PrefixCache``; every call is O(1).

    Locks are of the empty prefix and protect no page, but are given and taken like any others, so that a scheduler's
    mistakes show with the cache off too.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {page_size}")
        self._page_size = page_size
        self._accounts = PageAccounts(allocator)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def evictable_pages(self) -> int:
        """Always 0."""
        return self._accounts.evictable_pages

    @property
    def protected_pages(self) -> int:
        """Always 0."""
        return self._accounts.protected_pages

    @property
    def double_releases(self) -> int:
        """Receipts that somebody tried to release again."""
        return self._accounts.double_releases

    def match_prefix(self, key: RadixKey, now: float, priority: int = 0) -> MatchResult:
        """The empty match."""
        return MatchResult(NO_PAGES, 0, self._accounts.root, self._accounts.root, 0)

    def peek(self, key: RadixKey) -> int:
        """Always 0."""
        return 0

    def insert(
        self, key: RadixKey, pages: PageIndices, now: float, *, priority: int = 0, owner: str = NOBODY
    ) -> InsertResult:
        """Keep nothing: all pages stay the caller's."""
        return InsertResult(0, 0, NO_PAGES, self._accounts.root)

    def lock(self, node: TreeNode) -> LockReceipt:
        """A receipt for the empty prefix."""
        return self._accounts.lock(node)

    def release(self, receipt: LockReceipt) -> None:
        """Take it back; raises DoubleReleaseError the second time."""
        self._accounts.release(receipt)

    def evictable_for(self, owner: str) -> int:
        """Always 0."""
        return 0

    def evict(self, pages: int, owner: str = NOBODY) -> int:
        """Always 0: there is nothing to free."""
        return 0

    def flush(self) -> None:
        """Nothing to forget."""

    def owned_pages(self) -> PageIndices:
        """None."""
        return owned_pages(self._accounts)

    def check_invariants(self) -> None:
        """Raises InvariantError when it holds anything after all."""
        check_accounts("NoCache", self._accounts, self._page_size * TOKEN_BYTES)

    def __repr__(self) -> str:
        return f"NoCache(page_size={self._page_size}, {summary(self._accounts)})"
