"""Load-backs: what only the host has of a match comes back to the device, or the front of it."""

from prefixmesh.cache.base import MatchResult
from prefixmesh.cache.copies import Restore
from prefixmesh.cache.copy_book import MAX_COPIES, CopyBook
from prefixmesh.cache.node import TreeNode, end_of, nodes_from, pack_pages, unpack_pages
from prefixmesh.cache.tier import Tier
from prefixmesh.tokens import TOKEN_BYTES


class Restores(CopyBook):
    """``begin_restore``, then ``finish_restore`` or ``fail_restore``."""

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
        device_pages = self._make_room(len(host_pages), owner)
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
            self._tree.gained(Tier.DEVICE, at)
        self._unlock(copy)
        # Part of the path may have been inserted meanwhile, and stands before what came below it now.
        self._accounts.touch_device_path(node)
        self._free_spare(self._accounts.allocator.free, spare)

    def fail_restore(self, copy: Restore) -> None:
        """It will not be completed (and nothing writes to its pages any more): they are free again. O(depth + pages)."""
        self._fail_on_device(copy, Restore)
