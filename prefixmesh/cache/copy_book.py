"""The book of the copies in flight: how many may be, which pages they own, and how each ends once. What each kind does is in
``offloads``, ``restores`` and ``fetches``.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import InsertResult, PageIndices, RadixKey
from prefixmesh.cache.copies import Copy, Fetch, Offload, Restore
from prefixmesh.cache.events import EventSink
from prefixmesh.cache.host_tier import HostTier
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, previous_fingerprint, unpack_pages
from prefixmesh.cache.owners import Rank
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import DoubleReleaseError, InternalError
from prefixmesh.tokens import TOKEN_BYTES

MAX_COPIES: Final = 1024
"""In flight at once. Each locks two paths: without a bound, whoever begins copies faster than they end could lock the whole cache.
A worker's own queue is shorter."""


class _Insert(Protocol):
    """``RadixCache.insert``."""

    def __call__(
        self, key: RadixKey, pages: PageIndices, now: float, *, priority: int = 0, owner: str = ""
    ) -> InsertResult: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeCalls:
    """What a tree does for its copies."""

    make_room: Callable[[int, str], PageIndices | None]
    """Allocate so many device pages, evicting if need be, for an owner."""
    evict_host: Callable[[int, str, Rank, int], int]
    """Free so many host pages for an owner's newcomer, beside so many that it has taken already."""
    shed: Callable[[int, Collection[TreeNode]], int]
    """``Evictor.shed``."""
    demote_path: Callable[[TreeNode, int], None]
    """``Evictor.demote_path``."""
    gained: Callable[[Tier, TreeNode], None]
    """Told of every node that came to a tier by a copy between the two, parents first."""
    part_of: Callable[[TreeNode, int], TreeNode]
    """``Grower.part_of``."""
    insert: _Insert
    can_hold: Callable[[RadixKey], bool]
    """Whether a key's boundary is where the tree can divide."""


class CopyBook:
    """The copies of one cache that have begun and not ended.

    Every copy that was begun must be ended once; ending it again raises DoubleReleaseError, ending another cache's or another
    kind's InternalError, and either changes nothing. A finished copy is a use of the path to its end, on the tier it went to.
    """

    def __init__(
        self,
        accounts: PageAccounts,
        host: HostTier,
        page_bytes: int,
        events: EventSink,
        tree: TreeCalls,
    ) -> None:
        self._accounts = accounts
        self._host = host
        self._page_bytes = page_bytes
        self._events = events
        self._tree = tree
        self.in_flight: dict[Copy, None] = {}
        """All that have begun and not ended."""
        self._owned = [0 for _ in Tier]
        self._offloading: dict[TreeNode, Offload] = {}
        """Backups in flight, by the node where each ends."""
        self.without_room = 0
        """Copies that were not begun for want of pages, or because too many are in flight; only rises."""
        self.evicted_pages = 0
        """Device pages that were given up for copies; only rises."""
        self.left_pages = 0
        """Device pages that backups left out, because the host had no room for them; only rises."""
        self.duplicate_pages = 0
        """Destination pages that were freed because their node had been served otherwise, or cut off by a flush, meanwhile; only
        rises."""

    def destination_pages(self, tier: Tier) -> int:
        """Pages of a tier that copies in flight own. O(1)."""
        return self._owned[tier]

    def _first_of(self, path: list[TreeNode], start: int, wanted: int) -> list[TreeNode]:
        """Of a path that begins at byte ``start``, deepest first, the nodes of its first ``wanted`` bytes, cut to whole pages; splits
        the node in which they end. The new path must be touched, or locked and released, next. O(depth + length of the edge)."""
        end = start + wanted // self._page_bytes * self._page_bytes
        first = [at for at in path if at.start * TOKEN_BYTES < end]
        inside = end - first[0].start * TOKEN_BYTES
        return [self._tree.part_of(first[0], inside), *first[1:]]

    def _is_on_device(self, node: TreeNode) -> bool:
        """Whether a match that ended here on the device could be what it was: the node was neither evicted nor cut off."""
        if node is self._accounts.root:
            return True
        return node.parent is not None and bool(node.pages) and node.payer is not self._accounts.gone

    def _make_room(self, pages: int, owner: str) -> PageIndices | None:
        """So many device pages for a copy, evicting if need be; None when they cannot be had."""
        allocator = self._accounts.allocator
        free_before = allocator.free_pages
        taken = self._tree.make_room(pages, owner)
        self.evicted_pages += allocator.free_pages + (0 if taken is None else pages) - free_before
        return taken

    def _begin(self, copy: Copy) -> None:
        self.in_flight[copy] = None
        for tier in Tier:
            self._owned[tier] += len(copy.owned_on(tier))

    def _end(self, copy: Copy, kind: type[Copy]) -> TreeNode:
        node = copy.node
        if node is None:
            raise DoubleReleaseError(f"{copy!r} was ended twice")
        if copy not in self.in_flight or not isinstance(copy, kind):
            raise InternalError(f"{copy!r} is not a {kind.__name__} of this cache")
        for tier in Tier:
            self._owned[tier] -= len(copy.owned_on(tier))
        copy.node = None
        del self.in_flight[copy]
        return node

    def _unlock(self, copy: Copy) -> None:
        if copy.device_lock is not None:
            self._accounts.release(copy.device_lock)
        if copy.host_lock is not None:
            self._host.release(copy.host_lock, self._accounts.gone, self._accounts.serial)

    def _announce(self, tier: Tier, nodes: list[TreeNode]) -> None:
        """Tell of the blocks that end in ``nodes``, given deepest first, parents first."""
        for node in reversed(nodes):
            if node.hash_value:
                self._events.stored(tier, previous_fingerprint(node, self._page_bytes), node.hash_value)

    def _fail_on_device(self, copy: Restore | Fetch, kind: type[Copy]) -> None:
        self._end(copy, kind)
        self._unlock(copy)
        self._accounts.allocator.free(copy.device_pages)

    def _free_spare(self, free: Callable[[PageIndices], None], spare: list[bytes]) -> None:
        packed = b"".join(spare)
        self.duplicate_pages += len(packed) // INDEX_BYTES
        free(unpack_pages(packed))
