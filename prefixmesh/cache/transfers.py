"""Copies between the tiers, and to and from elsewhere, as the tree sees them: what is held while one is in flight, and what its end
changes.

Only indices are moved here; who copies bytes (a thread, a stream) and when belongs to the worker. ``copies`` says what each kind
owns and locks while it is in flight: whatever happens meanwhile (the range may be split, the same prefix may be inserted by
somebody else, the cache may be flushed), every page has one owner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import InsertResult, MatchResult, PageIndices, RadixKey
from prefixmesh.cache.copies import Copy as Copy
from prefixmesh.cache.copies import Fetch as Fetch
from prefixmesh.cache.copies import HostRead as HostRead
from prefixmesh.cache.copies import Offload as Offload
from prefixmesh.cache.copies import Restore as Restore
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
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.walk import key_to
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

    make_room: Callable[[Tier, int, str], PageIndices | None]
    """Allocate so many pages of a tier, evicting if need be, for an owner."""
    gained: Callable[[TreeNode], None]
    """Told of every node that came to the device by a restore, parents first."""
    part_of: Callable[[TreeNode, int], TreeNode]
    """``Grower.part_of``."""
    insert: _Insert
    can_hold: Callable[[RadixKey], bool]
    """Whether a key's boundary is where the tree can divide."""


class Transfers:
    """The copies of one cache.

    * a backup: ``begin_offload``, ``finish_offload``, ``abort_offload``
    * a load-back: ``begin_restore``, ``finish_restore``, ``fail_restore``
    * KV from elsewhere: ``begin_fetch``, ``finish_fetch``, ``fail_fetch``
    * host copies read for elsewhere: ``begin_read``, ``end_read``

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
        self.without_room = 0
        """Copies that were not begun for want of pages, or because too many are in flight; only rises."""
        self.duplicate_pages = 0
        """Destination pages that were freed because their node had been served otherwise, or cut off by a flush, meanwhile; only
        rises."""

    def destination_pages(self, tier: Tier) -> int:
        """Pages of a tier that copies in flight own. O(1)."""
        return self._owned[tier]

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
        host_pages = self._tree.make_room(Tier.HOST, len(device_pages), node.payer.name)
        if host_pages is None:
            self._accounts.release(device_lock)
            self._host.release(host_lock, self._accounts.gone, self._accounts.serial)
            self.without_room += 1
            return None
        copy = Offload(
            node,
            end_of(top),
            device_pages=device_pages,
            host_pages=host_pages,
            device_lock=device_lock,
            host_lock=host_lock,
        )
        self._offloading[node] = copy
        self._begin(copy)
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
        self._unlock(copy)
        # Part of the path may have had its copy before, and stands before what came below it now.
        self._host.touch_path(node, self._accounts.serial)
        self._free_spare(self._host.allocator.free, spare)

    def abort_offload(self, copy: Offload) -> None:
        """It will not be completed (and nothing writes to its pages any more): they are free again. O(depth + pages)."""
        self._offloading.pop(self._end(copy, Offload), None)
        self._unlock(copy)
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
        gone = node.payer is self._accounts.gone or not self._is_on_device(top)
        if gone or brings != match.host_hit_length:
            return None  # the match is not of this step: something was evicted, inserted or flushed since
        if tokens is not None and tokens < match.host_hit_length:
            path = self._first_of(path, match.matched_tokens * TOKEN_BYTES, tokens * TOKEN_BYTES)
            node = path[0]
        device_lock = self._accounts.lock(top)
        host_lock = self._host.lock(node)
        host_pages = unpack_pages(b"".join([at.host_pages for at in reversed(path)]))
        device_pages = self._tree.make_room(Tier.DEVICE, len(host_pages), owner)
        if device_pages is None:
            self._accounts.release(device_lock)
            self._host.release(host_lock, self._accounts.gone, self._accounts.serial)
            self.without_room += 1
            return None
        copy = Restore(
            node,
            end_of(top),
            device_pages=device_pages,
            host_pages=host_pages,
            device_lock=device_lock,
            host_lock=host_lock,
        )
        self._begin(copy)
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
            self._tree.gained(at)
        self._unlock(copy)
        # Part of the path may have been inserted meanwhile, and stands before what came below it now.
        self._accounts.touch_device_path(node)
        self._free_spare(self._accounts.allocator.free, spare)

    def fail_restore(self, copy: Restore) -> None:
        """It will not be completed (and nothing writes to its pages any more): they are free again. O(depth + pages)."""
        self._fail_on_device(copy, Restore)

    def begin_fetch(self, key: RadixKey, match: MatchResult, tokens: int, owner: str = "") -> Fetch | None:
        """Take device pages for the ``tokens`` of ``key`` right beyond its match on the device, cut to the key and to whole pages;
        None when that is nothing, or when too few pages can be had. What the host has of them is not looked at. To be called in the
        step that matched. O(depth + pages).

        Raises InternalError for a key whose boundary no insert could take.
        """
        parent = match.last_device_node
        tokens = min(tokens, len(key.tokens) // TOKEN_BYTES - match.matched_tokens)
        pages = tokens * TOKEN_BYTES // self._page_bytes
        if pages < 1 or not self._is_on_device(parent) or end_of(parent) != match.matched_tokens:
            return None  # too little; or the match is not of this step
        end = match.matched_tokens * TOKEN_BYTES + pages * self._page_bytes
        if not self._tree.can_hold(key):
            raise InternalError(
                f"a fetch over a boundary at {key.boundary_tokens} tokens, where no page or block ends"
            )
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        device_lock = self._accounts.lock(parent)
        device_pages = self._tree.make_room(Tier.DEVICE, pages, owner)
        if device_pages is None:
            self._accounts.release(device_lock)
            self.without_room += 1
            return None
        copy = Fetch(
            parent,
            match.matched_tokens,
            key=key._replace(tokens=key.tokens[:end]),
            owner=owner,
            life=self._accounts.root,
            device_pages=device_pages,
            device_lock=device_lock,
        )
        self._begin(copy)
        return copy

    def finish_fetch(self, copy: Fetch, now: float) -> InsertResult | None:
        """The bytes are there: as an insert of what was computed, behind the match that it began at; pages for what somebody else has
        inserted meanwhile are freed. None, and all are, after a flush. Match again to use them. O(length of the key)."""
        parent = self._end(copy, Fetch)
        result: InsertResult | None = None
        if copy.life is self._accounts.root:
            before = [at.pages for at in reversed(nodes_from(parent, 0))]
            pages = unpack_pages(b"".join([*before, pack_pages(copy.device_pages)]))
            result = self._tree.insert(copy.key, pages, now, owner=copy.owner)
            self.duplicate_pages += int((result.device_indices != pages).sum())
        else:
            self._free_spare(self._accounts.allocator.free, [pack_pages(copy.device_pages)])
        self._unlock(copy)
        return result

    def fail_fetch(self, copy: Fetch) -> None:
        """As ``fail_restore``."""
        self._fail_on_device(copy, Fetch)

    def begin_read(self, node: TreeNode) -> HostRead | None:
        """Keep the host's copies of the whole path to ``node`` as they are while somebody reads them; None when the host has not all of
        it. O(depth + length of the path)."""
        if not node.host_pages or node.payer is self._accounts.gone:
            return None
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        path = nodes_from(node, 0)
        copy = HostRead(
            node,
            key=key_to(node, self._page_bytes),
            host_pages=unpack_pages(b"".join([at.host_pages for at in reversed(path)])),
            host_lock=self._host.lock(node),
        )
        self._begin(copy)
        return copy

    def end_read(self, copy: HostRead) -> None:
        """They have been read, or will not be. O(depth)."""
        self._end(copy, HostRead)
        self._unlock(copy)

    def _fail_on_device(self, copy: Restore | Fetch, kind: type[Copy]) -> None:
        self._end(copy, kind)
        self._unlock(copy)
        self._accounts.allocator.free(copy.device_pages)

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

    def _free_spare(self, free: Callable[[PageIndices], None], spare: list[bytes]) -> None:
        packed = b"".join(spare)
        self.duplicate_pages += len(packed) // INDEX_BYTES
        free(unpack_pages(packed))
