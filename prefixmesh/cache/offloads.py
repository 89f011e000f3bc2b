"""Backups: what the device has comes to the host as well, as far as the host has room that the policy would give it."""

from collections.abc import Collection

from prefixmesh.cache.copies import Offload
from prefixmesh.cache.copy_book import MAX_COPIES, CopyBook
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, end_of, nodes_from, pack_pages, unpack_pages
from prefixmesh.cache.tier import Tier
from prefixmesh.tokens import TOKEN_BYTES


class Offloads(CopyBook):
    """``begin_offload``, then ``finish_offload`` or ``abort_offload``."""

    def begin_offload(
        self, node: TreeNode, going: Collection[TreeNode] | None = None, used_at: int | None = None
    ) -> Offload | None:
        """Copy to the host what of the path to ``node`` is not there yet, from its front as much as there is room for (the node in
        which that ends is split there); None when that is nothing, or when a copy of it is in flight. O(depth + pages).

        Room is what is free, and what the policy would give up for what comes: see ``_room_on_host``. What did not fit is counted in
        ``left_pages``. With ``going``, nodes that are about to leave the device, copies of what else the device has are shed first;
        ``used_at`` counts as the last use of what comes.
        """
        if not node.pages or node in self._offloading or node.payer is self._accounts.gone:
            return None
        top = node
        path: list[TreeNode] = []
        while top.parent is not None and not top.host_pages:
            path.append(top)
            top = top.parent
        if not path:
            return None
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        host_lock = self._host.lock(top)
        wanted = sum(len(at.pages) for at in path) // INDEX_BYTES
        room = self._room_on_host(path, node.payer.name, going, used_at)
        self.left_pages += wanted - room
        if 0 < room < wanted:
            path = self._first_of(path, end_of(top) * TOKEN_BYTES, room * self._page_bytes)
            node = path[0]
        host_pages = self._host.allocator.allocate(room) if node not in self._offloading else None
        if not room or host_pages is None:
            self._host.release(host_lock, self._accounts.gone, self._accounts.serial)
            self.without_room += 1
            return None
        copy = Offload(
            node,
            end_of(top),
            device_pages=unpack_pages(b"".join([at.pages for at in reversed(path)])),
            host_pages=host_pages,
            device_lock=self._accounts.lock(node),
            host_lock=host_lock,
        )
        copy.gives_from = None
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
        for at in reversed(stored):
            self._tree.gained(Tier.HOST, at)
        self._unlock(copy)
        # Part of the path may have had its copy before, and stands before what came below it now.
        self._host.touch_path(node, self._accounts.serial)
        self._free_spare(self._host.allocator.free, spare)
        if copy.gives_from is not None:
            self._tree.demote_path(node, copy.gives_from)

    def abort_offload(self, copy: Offload) -> None:
        """It will not be completed (and nothing writes to its pages any more): they are free again. O(depth + pages)."""
        self._offloading.pop(self._end(copy, Offload), None)
        self._unlock(copy)
        self._host.allocator.free(copy.host_pages)

    def _room_on_host(
        self, path: list[TreeNode], owner: str, going: Collection[TreeNode] | None, used_at: int | None
    ) -> int:
        """Pages, counted from the front of a path (given deepest first), for which the host is free or can be made free by giving up
        only what the policy would give up for each of them: used less, or not later, or of lower priority. O(depth + nodes given up).

        Who is locked is in use now. So what was asked for once does not sweep the host of what is asked for often, unless the policy
        looks at recency alone; and a backup that has waited its turn for long takes nothing from what was used meanwhile.
        """
        allocator, lines = self._host.allocator, self._host.lines
        room = 0
        for at in reversed(path):
            wanted = room + len(at.pages) // INDEX_BYTES
            if going is not None and wanted > allocator.free_pages:
                self._tree.shed(wanted - allocator.free_pages, going)
            if wanted > allocator.free_pages:
                last_use = at.serial if used_at is None else used_at
                newcomer = lines.rank_of(at, self._accounts.serial if at.lock_ref else last_use)
                self._tree.evict_host(wanted - allocator.free_pages, owner, newcomer, room)
            room = min(wanted, allocator.free_pages)
            if room < wanted:
                break
        return room
