"""Putting KV into the tree: splitting edges, attaching pages to nodes, new leaves, their fingerprints. The evictor's counterpart.

It tells the event sink of every block that comes to the device, and the seen blocks of every prompt's first one.
"""

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.events import EventSink
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, previous_fingerprint
from prefixmesh.cache.owners import NOBODY
from prefixmesh.cache.seen_blocks import SeenBlocks
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.walk import edge_name, segment_end, step
from prefixmesh.tokens import TOKEN_BYTES

_DEVICE = Tier.DEVICE


class Grower:
    """Grows one tree."""

    def __init__(
        self, accounts: PageAccounts, page_size: int, block_size: int, events: EventSink, seen: SeenBlocks
    ) -> None:
        self._accounts = accounts
        self._page_bytes = page_size * TOKEN_BYTES
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._events = events
        self._seen = seen

    def part_of(self, node: TreeNode, shared_bytes: int) -> TreeNode:
        """The node that is exactly the first ``shared_bytes`` of this one's edge: itself, or a new upper half, whose path must
        be touched next. O(length of the edge)."""
        if shared_bytes == len(node.key):
            return node
        end = node.start + shared_bytes // TOKEN_BYTES
        return self._accounts.split(
            node,
            shared_bytes,
            shared_bytes // self._page_bytes,
            node.key[shared_bytes : shared_bytes + self._page_bytes],
            end // self._block_size - node.start // self._block_size,
        )

    def grow(
        self,
        node: TreeNode,
        key: RadixKey,
        position: int,
        fresh: bytes,
        now: float,
        priority: int,
        owner: str,
    ) -> TreeNode:
        """Put ``fresh`` packed pages below ``node``, which ends at byte ``position`` of ``key``, where the device has no more of
        it; returns the new end, whose path must be touched next. O(length)."""
        host = self._accounts.host
        if host is not None and host.cached_pages:
            end, position, attached = self._attach(node, key, position, fresh)
            node, fresh = end, fresh[attached:]
        if priority > node.priority:
            self._accounts.raise_priority(node, priority)
        if not key.boundary_tokens and fresh:
            return self._add_leaf(node, key, position, fresh, now, priority, owner)
        while fresh:  # one leaf up to the boundary, which nobody in particular pays for, and one after it
            public = position < key.boundary_tokens * TOKEN_BYTES
            pages = (segment_end(key, position) - position) // self._page_bytes
            held, fresh = fresh[: pages * INDEX_BYTES], fresh[pages * INDEX_BYTES :]
            node = self._add_leaf(node, key, position, held, now, priority, NOBODY if public else owner)
            position += pages * self._page_bytes
        return node

    def _attach(
        self, node: TreeNode, key: RadixKey, position: int, fresh: bytes
    ) -> tuple[TreeNode, int, int]:
        """Give the nodes that the host alone has of the key their device pages; returns the last one, the byte of the key
        where it ends, and the bytes of ``fresh`` that were used."""
        used = 0
        while (taken := step(node, key, position, self._page_bytes)) is not None:
            node = self.part_of(taken.child, taken.shared_bytes)
            end = used + taken.shared_bytes // self._page_bytes * INDEX_BYTES
            self._accounts.attach(node, fresh[used:end])
            if node.hash_value:
                self._events.stored(_DEVICE, previous_fingerprint(node, self._page_bytes), node.hash_value)
            used = end
            position += taken.shared_bytes
        return node, position, used

    def _add_leaf(
        self,
        parent: TreeNode,
        key: RadixKey,
        position: int,
        held: bytes,
        now: float,
        priority: int,
        owner: str,
    ) -> TreeNode:
        """A new leaf that holds these pages, its blocks named and told of."""
        accounts = self._accounts
        end = position + len(held) // INDEX_BYTES * self._page_bytes
        leaf = TreeNode(
            parent,
            edge_name(key, position, self._page_bytes),
            key.tokens[position:end],
            held,
            now,
            accounts.lines.payer(owner),
            position // TOKEN_BYTES,
        )
        leaf.priority = priority
        accounts.adopt(leaf)
        first = position // self._block_bytes
        last = end // self._block_bytes
        if first < last:
            self._name_blocks(leaf, key, first, last)
        return leaf

    def _name_blocks(self, leaf: TreeNode, key: RadixKey, first: int, last: int) -> None:
        """Blocks ``first`` to ``last - 1`` of the key end in this leaf. O(their length)."""
        previous = previous_fingerprint(leaf, self._page_bytes)
        if previous is not None:
            seed: bytes = previous.to_bytes(8, "little")
        elif key.boundary_tokens and leaf.start >= key.boundary_tokens:
            seed = key.tail
        else:
            seed = key.namespace
        tokens = key.tokens[first * self._block_bytes : last * self._block_bytes]
        names = tuple(block_fingerprints(seed, tokens, self._block_size))
        leaf.hash_value = names
        self._events.stored(_DEVICE, previous, names)
        if not first:
            self._seen.first_stored(key.namespace, tokens[: self._block_bytes], names[0])
