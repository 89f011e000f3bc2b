"""Copies between the tiers, as the tree sees them: what is held while one is in flight, and what its end changes.

Only indices are moved here; who copies bytes (a thread, a stream) and when belongs to the worker. A copy has two ends. Its
*source* keeps its owner, the tree, and is locked; its *destination* is owned by the copy alone until the end, when each page
becomes a node's or is freed. So a page has one owner at every moment, whatever happens meanwhile: the range may be split, the
same prefix may be inserted by somebody else, the cache may be flushed.

====================  ====================================  ====================================
while in flight       offload (device to host)              restore (host to device)
====================  ====================================  ====================================
device lock           node and all above it                 last node on the device and above
host lock             last node on the host and above       node and all above it
destination           host pages, owned by the copy         device pages, owned by the copy
====================  ====================================  ====================================
"""

from collections.abc import Callable
from typing import Final

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import MatchResult, PageIndices
from prefixmesh.cache.events import EventSink
from prefixmesh.cache.host_tier import HostTier
from prefixmesh.cache.node import (
    INDEX_BYTES,
    TreeNode,
    end_of,
    nodes_from,
    pack_pages,
    previous_fingerprint,
    unpack_pages,
)
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import DoubleReleaseError, InternalError
from prefixmesh.tokens import TOKEN_BYTES

MAX_COPIES: Final = 1024
"""In flight at once. Each locks two paths: without a bound, whoever begins copies faster than they end could lock the whole cache.
A worker's own queue is shorter."""


class Copy:
    """One copy in flight. ``device_pages[i]`` and ``host_pages[i]`` are the two ends of one page."""

    __slots__ = ("device_lock", "device_pages", "host_lock", "host_pages", "node", "start")

    def __init__(
        self,
        node: TreeNode,
        start: int,
        device_pages: PageIndices,
        host_pages: PageIndices,
        device_lock: LockReceipt,
        host_lock: LockReceipt,
    ) -> None:
        self.node: TreeNode | None = node
        """Where the copied range ends; None once the copy has ended."""
        self.start = start
        """The token at which it begins."""
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.device_lock = device_lock
        self.host_lock = host_lock

    def __repr__(self) -> str:
        state = "ended" if self.node is None else "in flight"
        return f"{type(self).__name__}({len(self.device_pages)} pages, {state})"


class Offload(Copy):
    """From the device to the host."""

    __slots__ = ()


class Restore(Copy):
    """From the host back to the device."""

    __slots__ = ()


class Transfers:
    """The copies of one cache: ``begin_offload``, ``finish_offload``, ``abort_offload``; ``begin_restore``, ``finish_restore``,
    ``fail_restore``.

    Every copy that was begun must be ended once; ending it again raises DoubleReleaseError, ending another cache's or another
    kind's InternalError, and either changes nothing. A finished copy
    is a use of the path to its end, on the tier it went to.
    """

    def __init__(
        self,
        accounts: PageAccounts,
        host: HostTier,
        page_bytes: int,
        events: EventSink,
        make_room: Callable[[Tier, int, str], PageIndices | None],
        gained: Callable[[TreeNode], None],
        part_of: Callable[[TreeNode, int], TreeNode],
    ) -> None:
        """``make_room`` allocates pages of a tier, evicting if need be, for an owner; ``gained`` is told of every node that
        came to the device, parents first; ``part_of`` is ``Grower.part_of``."""
        self._accounts = accounts
        self._host = host
        self._page_bytes = page_bytes
        self._events = events
        self._make_room = make_room
        self._gained = gained
        self._part_of = part_of
        self.in_flight: dict[Copy, None] = {}
        """All that have begun and not ended."""
        self._offloading: dict[TreeNode, Offload] = {}
        self.without_room = 0
        """Copies that were not begun for want of pages, or because too many are in flight; only rises."""
        self.duplicate_pages = 0
        """Destination pages that were freed because their node had been served otherwise, or cut off by a flush, meanwhile; only
        rises."""

    def destination_pages(self, tier: Tier) -> int:
        """Pages of a tier that copies in flight own. O(copies)."""
        kind = Restore if tier is Tier.DEVICE else Offload
        return sum(len(copy.device_pages) for copy in self.in_flight if isinstance(copy, kind))

    def begin_offload(self, node: TreeNode) -> Offload | None:
        """Copy to the host what of the path to ``node`` is not there yet; None when there is nothing to copy, when a copy of
        it is in flight, or when no host page can be had. O(depth + pages)."""
        if not node.pages or node in self._offloading or node.payer is self._accounts.gone:
            return None
        top = node
        missing: list[bytes] = []
        while top.parent is not None and not top.host_pages:
            missing.append(top.pages)
            top = top.parent
        if not missing:
            return None
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        device_lock = self._accounts.lock(node)
        host_lock = self._host.lock(top)
        device_pages = unpack_pages(b"".join(reversed(missing)))
        host_pages = self._make_room(Tier.HOST, len(device_pages), node.payer.name)
        if host_pages is None:
            self._unlock(device_lock, host_lock)
            self.without_room += 1
            return None
        copy = Offload(node, end_of(top), device_pages, host_pages, device_lock, host_lock)
        self._offloading[node] = copy
        self.in_flight[copy] = None
        return copy

    def finish_offload(self, copy: Offload) -> None:
        """The bytes are there: the host pages become the nodes', and may be read. O(depth + pages)."""
        node = self._end(copy, Offload)
        self._offloading.pop(node, None)
        stored: list[TreeNode] = []
        spare: list[bytes] = []
        packed = pack_pages(copy.host_pages)
        end = len(packed)
        self._accounts.serial += 1
        for at in nodes_from(node, copy.start):  # deepest first, as they stand in line
            part = packed[end - len(at.pages) : end]
            end -= len(part)
            if at.payer is self._accounts.gone or at.host_pages:
                spare.append(part)
            else:
                self._host.attach(at, part, self._accounts.serial)
                stored.append(at)
        self._announce(Tier.HOST, stored)
        self._unlock(copy.device_lock, copy.host_lock)
        # Part of the path may have had its copy before, and stands before what came below it now.
        self._host.touch_path(node, self._accounts.serial)
        self._free_spare(self._host.allocator.free, spare)

    def abort_offload(self, copy: Offload) -> None:
        """It will not be completed (and nothing writes to its pages any more): they are free again. O(depth + pages)."""
        self._offloading.pop(self._end(copy, Offload), None)
        self._unlock(copy.device_lock, copy.host_lock)
        self._host.allocator.free(copy.host_pages)

    def begin_restore(self, match: MatchResult, owner: str = "", tokens: int | None = None) -> Restore | None:
        """Bring back to the device what only the host has of a match, or only the first ``tokens`` of that, cut to whole pages
        (the node in which they end is split there); None when that is nothing, or when too few device pages can be had. To be
        called in the step that matched. O(depth + pages)."""
        top, node = match.last_device_node, match.last_host_node
        if not match.host_hit_length or (tokens is not None and tokens * TOKEN_BYTES < self._page_bytes):
            return None
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        path = nodes_from(node, end_of(top))
        brings = sum(len(at.key) for at in path if at.host_pages and not at.pages) // TOKEN_BYTES
        if brings != match.host_hit_length or node.payer is self._accounts.gone:
            return None  # the match is not of this step: something was evicted, inserted or flushed since
        if tokens is not None and tokens < match.host_hit_length:
            path = self._first_of(path, match.matched_tokens * TOKEN_BYTES, tokens * TOKEN_BYTES)
            node = path[0]
        device_lock = self._accounts.lock(top)
        host_lock = self._host.lock(node)
        host_pages = unpack_pages(b"".join([at.host_pages for at in reversed(path)]))
        device_pages = self._make_room(Tier.DEVICE, len(host_pages), owner)
        if device_pages is None:
            self._unlock(device_lock, host_lock)
            self.without_room += 1
            return None
        copy = Restore(node, end_of(top), device_pages, host_pages, device_lock, host_lock)
        self.in_flight[copy] = None
        return copy

    def finish_restore(self, copy: Restore) -> None:
        """The bytes are there: the device pages become the nodes', except where somebody's insert has put others meanwhile.
        Match again to use them. O(depth + pages)."""
        node = self._end(copy, Restore)
        stored: list[TreeNode] = []
        spare: list[bytes] = []
        packed = pack_pages(copy.device_pages)
        end = len(packed)
        self._accounts.serial += 1
        for at in nodes_from(node, copy.start):
            part = packed[end - len(at.host_pages) : end]
            end -= len(part)
            if at.payer is self._accounts.gone or at.pages:
                spare.append(part)
            else:
                self._accounts.attach(at, part)
                stored.append(at)
        self._announce(Tier.DEVICE, stored)
        for at in reversed(stored):
            self._gained(at)
        self._unlock(copy.device_lock, copy.host_lock)
        # Part of the path may have been inserted meanwhile, and stands before what came below it now.
        self._accounts.touch_device_path(node)
        self._free_spare(self._accounts.allocator.free, spare)

    def fail_restore(self, copy: Restore) -> None:
        """It will not be completed (and nothing writes to its pages any more): they are free again. O(depth + pages)."""
        self._end(copy, Restore)
        self._unlock(copy.device_lock, copy.host_lock)
        self._accounts.allocator.free(copy.device_pages)

    def _first_of(self, path: list[TreeNode], start: int, wanted: int) -> list[TreeNode]:
        """Of a path that begins at byte ``start``, deepest first, the nodes of its first ``wanted`` bytes, cut to whole pages; splits
        the node in which they end. The new path must be touched, or locked and released, next. O(depth + length of the edge)."""
        end = start + wanted // self._page_bytes * self._page_bytes
        first = [at for at in path if at.start * TOKEN_BYTES < end]
        inside = end - first[0].start * TOKEN_BYTES
        return [self._part_of(first[0], inside), *first[1:]]

    def _end(self, copy: Copy, kind: type[Copy]) -> TreeNode:
        node = copy.node
        if node is None:
            raise DoubleReleaseError(f"{copy!r} was ended twice")
        if copy not in self.in_flight or not isinstance(copy, kind):
            raise InternalError(f"{copy!r} is not a {kind.__name__} of this cache")
        copy.node = None
        del self.in_flight[copy]
        return node

    def _unlock(self, device_lock: LockReceipt, host_lock: LockReceipt) -> None:
        self._accounts.release(device_lock)
        self._host.release(host_lock, self._accounts.gone, self._accounts.serial)

    def _announce(self, tier: Tier, nodes: list[TreeNode]) -> None:
        """Tell of the blocks that end in ``nodes``, given deepest first, parents first."""
        for node in reversed(nodes):
            if node.hash_value:
                self._events.stored(tier, previous_fingerprint(node, self._page_bytes), node.hash_value)

    def _free_spare(self, free: Callable[[PageIndices], None], spare: list[bytes]) -> None:
        packed = b"".join(spare)
        self.duplicate_pages += len(packed) // INDEX_BYTES
        free(unpack_pages(packed))
