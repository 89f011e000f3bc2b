"""Giving pages up, on either tier: exactly as many as are wanted, and no KV more than that lost.

``owners`` says whose node goes next; this takes it, whole or in part, and tells what went. A node on one tier alone leaves the
tree, or is trimmed from its end. A node on both only leaves the one: the other copy stays, and where part of it goes the node is
split, because a node is on a tier wholly or not at all. Such a split puts the part that stays first in its own line, where the
whole stood, and counts as a use of it on the other tier, whose line has no place between two nodes.
"""

from collections.abc import Collection
from typing import Final

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.events import EventSink
from prefixmesh.cache.host_tier import HostTier
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, unpack_pages
from prefixmesh.cache.owners import Rank
from prefixmesh.cache.seen_blocks import SeenBlocks
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.tokens import TOKEN_BYTES

MAX_SHED_LOOKS: Final = 512
"""Nodes at the back of the device's lines that are looked at for copies to shed: some tens of microseconds."""


class Evictor:
    """Evicts from the two tiers of one tree."""

    def __init__(
        self, accounts: PageAccounts, page_size: int, block_size: int, events: EventSink, seen: SeenBlocks
    ) -> None:
        self._accounts = accounts
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._block_size = block_size
        self._events = events
        self._seen = seen

    def evict(self, pages: int, owner: str) -> int:
        """Free device pages; see ``RadixCache.evict``."""
        accounts = self._accounts
        lines = accounts.lines
        accounts.serial = serial = accounts.serial + 1
        given_up: list[bytes] = []
        names: list[Fingerprint] = []
        freed = 0
        while freed < pages:
            victim = lines.next_victim(owner, pages, pages - freed, serial)
            if victim is None:
                break
            node, allowed = victim
            parent = node.parent
            if len(node.pages) > allowed * INDEX_BYTES:
                part = self._cut_device(node, allowed, names)
            elif not node.host_pages:
                names += node.hash_value
                part = accounts.drop(node)
                self._seen.left(node.start, node.hash_value)
            else:
                names += node.hash_value
                part = accounts.demote(node)
            freed += len(part) // INDEX_BYTES
            given_up.append(part)
            if lines.aside:
                lines.child_left(parent)
        if names:
            self._events.removed(Tier.DEVICE, names)
        if lines.aside:
            for node in lines.put_back():
                accounts.serial += 1
                accounts.touch_device_path(node)
        accounts.allocator.free(unpack_pages(b"".join(given_up)))
        return freed

    def evict_host(
        self, host: HostTier, pages: int, owner: str, newcomer: Rank | None = None, taken: int = 0
    ) -> int:
        """Free host pages; see ``RadixCache.evict_host``. With a ``newcomer``, only what the policy would give up for it; ``owner`` has
        ``taken`` pages beside, which nobody is charged for yet."""
        accounts = self._accounts
        accounts.serial = serial = accounts.serial + 1
        given_up: list[bytes] = []
        names: list[Fingerprint] = []
        freed = 0
        while freed < pages:
            victim = host.lines.next_victim(owner, pages + taken, pages - freed, serial, newcomer)
            if victim is None:
                break
            node, allowed = victim
            parent = node.parent
            if len(node.host_pages) > allowed * INDEX_BYTES:
                part = self._cut_host(host, node, allowed, names)
            else:
                part = host.strip(node)
                names += node.hash_value
                if not node.pages:
                    accounts.forget(node)
                    self._seen.left(node.start, node.hash_value)
            freed += len(part) // INDEX_BYTES
            given_up.append(part)
            if host.lines.aside:
                host.lines.child_left(parent)
        if names:
            self._events.removed(Tier.HOST, names)
        if host.lines.aside:
            for node in host.lines.put_back():
                accounts.serial += 1
                host.touch_path(node, accounts.serial)
        host.allocator.free(unpack_pages(b"".join(given_up)))
        return freed

    def shed(self, host: HostTier, pages: int, going: Collection[TreeNode]) -> int:
        """Free host pages, ``pages`` if it can and a node's rest more, by copies of what the device has too and keeps longest: from the
        back of its lines, each path from its end on, no node that is ``going`` from there. Loses nothing; returns how many.

        Not where there are quotas, which say who gives. O(nodes), at most ``MAX_SHED_LOOKS`` and what is given up.
        """
        shed: list[TreeNode] = []
        freed = 0
        if host.lines.has_quotas:
            return 0
        parts: list[bytes] = []
        for node in self._accounts.lines.in_order(MAX_SHED_LOOKS, backwards=True):
            if freed >= pages:
                break
            at = node
            while freed < pages and at not in going and _is_spare(at):
                shed.append(at)
                parts.append(host.strip(at))
                freed += len(parts[-1]) // INDEX_BYTES
                assert at.parent is not None
                at = at.parent
        names = [name for node in shed for name in node.hash_value]
        if names:
            self._events.removed(Tier.HOST, names)
        host.allocator.free(unpack_pages(b"".join(parts)))
        return freed

    def demote_path(self, node: TreeNode, start: int) -> None:
        """Of the path to ``node`` from token ``start`` on, take from the device what can go, from its end, as far as the host has it.
        O(nodes that go)."""
        accounts = self._accounts
        names: list[Fingerprint] = []
        parts: list[bytes] = []
        at = node
        while (parent := at.parent) is not None and at.start >= start and _may_be_demoted(at):
            names += at.hash_value
            parts.append(accounts.demote(at))
            at = parent
        if names:
            self._events.removed(Tier.DEVICE, names)
        accounts.allocator.free(unpack_pages(b"".join(parts)))

    def _cut_device(self, node: TreeNode, pages: int, names: list[Fingerprint]) -> bytes:
        """The last ``pages`` device pages of an unlocked leaf; the blocks that end there are added to ``names``."""
        accounts = self._accounts
        kept = len(node.pages) // INDEX_BYTES - pages
        if not node.host_pages:
            blocks = self._blocks_in(node, kept)
            start, gone = node.start, node.hash_value[blocks:]
            part = accounts.trim(node, pages, kept * self._page_bytes, blocks)
            names += gone
            self._seen.left(start + kept * self._page_size, gone)
            return part
        upper = self._split(node, kept)
        part = accounts.demote(node)
        names += node.hash_value
        upper.payer.line.leave(upper)
        upper.payer.line.put_first(upper)
        if accounts.host is not None:
            accounts.host.touch_path(upper, accounts.serial)
        return part

    def _cut_host(self, host: HostTier, node: TreeNode, pages: int, names: list[Fingerprint]) -> bytes:
        """The last ``pages`` host pages of an unlocked leaf of the host's; as ``_cut_device``."""
        kept = len(node.host_pages) // INDEX_BYTES - pages
        if not node.pages:
            blocks = self._blocks_in(node, kept)
            gone = node.hash_value[blocks:]
            part = host.trim(node, pages)
            node.key = node.key[: kept * self._page_bytes]
            node.hash_value = node.hash_value[:blocks]
            names += gone
            self._seen.left(node.start + kept * self._page_size, gone)
            return part
        upper = self._split(node, kept)
        part = host.strip(node)
        names += node.hash_value
        host.put_first(upper)
        self._accounts.touch_device_path(upper)
        return part

    def _split(self, node: TreeNode, kept: int) -> TreeNode:
        key_bytes = kept * self._page_bytes
        lower_edge = node.key[key_bytes : key_bytes + self._page_bytes]
        return self._accounts.split(node, key_bytes, kept, lower_edge, self._blocks_in(node, kept))

    def _blocks_in(self, node: TreeNode, pages: int) -> int:
        """How many blocks end in the first ``pages`` pages of the edge."""
        size = self._block_size
        return (node.start + pages * self._page_size) // size - node.start // size


def _is_spare(node: TreeNode) -> bool:
    """Whether the device has it as well, and its copy could go from the host."""
    return bool(node.pages and node.host_pages) and not node.host_ref_counter and not node.has_host_children


def _may_be_demoted(node: TreeNode) -> bool:
    """Whether the host has it as well, and the device could give it up."""
    return bool(node.pages and node.host_pages) and not node.lock_ref and not node.has_device_children
