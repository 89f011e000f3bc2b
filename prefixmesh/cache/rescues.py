"""Rescues: what is about to leave the device and is nowhere else is copied to the host first. Looks ahead in the device's lines, and
makes room on the host by copies of what the device has and keeps.

So the tiers hold one copy of each thing where room is short, and their sizes add up. The device evicts nothing by itself here: a rescue
that has come takes its path off the device, since that is what it was for, and one that has failed leaves it there.
"""

from typing import Final

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.copies import Offload
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, end_of, nodes_from
from prefixmesh.cache.offloads import Offloads
from prefixmesh.cache.walk import step, walk_device

MAX_LOOKS_AHEAD: Final = 512
"""Nodes at the front of the device's lines that are looked at for what an eviction would take: some tens of microseconds. What lies
beyond goes without a rescue."""


class Rescues(Offloads):
    """``keep``, ``next_to_go``, ``begin_rescue``; it ends as any offload does."""

    _kept_at = 0
    """The operation that put last whoever waited last."""

    @property
    def free_device_pages(self) -> int:
        """Pages of the device that nobody owns."""
        return self._accounts.allocator.free_pages

    def keep(self, key: RadixKey) -> None:
        """Somebody waits for room for ``key``: what either tier has of it goes last. Neither a hit nor a split. O(depth + matched)."""
        node, _, position, inside, _ = walk_device(self._accounts.root, key, self._page_bytes)
        last = node if inside is None else inside
        while inside is None and (taken := step(node, key, position, self._page_bytes)) is not None:
            last = node = taken.child
            position += taken.shared_bytes
            if taken.shared_bytes < len(node.key):
                break
        self._accounts.reorder(last)
        self._kept_at = self._accounts.serial

    def next_to_go(self, pages: int) -> list[TreeNode]:
        """The nodes of which an eviction of so many device pages would take, in order, as far as ``MAX_LOOKS_AHEAD`` shows. Changes
        nothing; what quotas shelter is not told apart. O(nodes looked at)."""
        going: list[TreeNode] = []
        for node in self._accounts.lines.in_order(MAX_LOOKS_AHEAD):
            if pages <= 0:
                break
            if not node.lock_ref:
                going.append(node)
                pages -= len(node.pages) // INDEX_BYTES
        return going

    def begin_rescue(self, node: TreeNode, going: dict[TreeNode, None]) -> Offload | None:
        """Begin an offload of the path to ``node``, one of those that are ``going``; see ``begin_offload``. When it has come, what of the
        path nobody has used since before that takes its pages off the device, if all of it has come. O(depth + pages), and what
        ``Evictor.shed`` says.

        It counts as used until just before ``keep``: what the host alone has went from the device before it, as used less lately, though
        its copy may be younger.
        """
        starts = _cold_from(node)
        copy = self.begin_offload(node, going, self._kept_at - 1)
        if copy is not None and copy.node is node:
            copy.gives_from = starts
        return copy

    def gives(self, copy: Offload) -> int:
        """Device pages that come free when a rescue has come, if nobody asks for them meanwhile. O(depth)."""
        if copy.node is None or copy.gives_from is None:
            return 0
        return sum(len(at.pages) for at in nodes_from(copy.node, copy.gives_from)) // INDEX_BYTES


def _cold_from(node: TreeNode) -> int:
    """Where the part of the path to ``node`` begins that was used last when that was, and that nobody holds."""
    start, at = end_of(node), node
    while at.parent is not None and not at.lock_ref and at.serial == node.serial:
        start, at = at.start, at.parent
    return start
