"""What is to be copied to the host, in which order: the write policies and their bounded queue. Pure; it names nodes, others copy.

* ``write_through`` backs up whatever enters the cache, as soon as it is complete: a long prompt chunk by chunk, while it is
  still being computed;
* ``write_through_selective`` what was asked for again: a node at its second hit, and with it all above it.

A node stands for the whole path to its end, and a backup takes what the host lacks of it, parents first. The queue drops what comes when
it is full, and counts it: nobody ever waits for a backup, and the next match of the same prefix asks again.
"""

from typing import Final

from prefixmesh.cache.node import TreeNode
from prefixmesh.config import HostWritePolicy
from prefixmesh.tokens import TOKEN_BYTES

MAX_QUEUED_BACKUPS: Final = 1024
"""Nodes that wait to be copied: some seconds of a busy worker's inserts. More only says that the host cannot follow."""

SELECTIVE_HITS: Final = 2
"""Hits of a node from which ``write_through_selective`` takes it for shared."""


class BackupQueue:
    """First in, first out; each node once. Every method is O(1) but where it says otherwise."""

    def __init__(self, policy: HostWritePolicy, max_queued: int = MAX_QUEUED_BACKUPS) -> None:
        self._policy = policy
        self._max_queued = max_queued
        self._nodes: dict[TreeNode, None] = {}
        self.dropped_tokens = 0
        """Not queued, because the queue was full; only rises."""

    def __len__(self) -> int:
        return len(self._nodes)

    def inserted(self, node: TreeNode, *, is_wanted: bool = False) -> None:
        """The path to ``node`` is complete on the device. A pin may want it on the host, whatever the policy says."""
        if is_wanted or self._policy == "write_through":
            self._add(node)

    def matched(self, node: TreeNode) -> None:
        """Somebody found the path to ``node`` on the device. O(depth) for what is asked for the first time."""
        if self._policy == "write_through_selective":
            while node.parent is not None and node.hit_count < SELECTIVE_HITS:
                node = node.parent
        self._add(node)

    def wants(self, node: TreeNode) -> bool:
        """Whether what is about to leave the device is worth a copy under this policy. O(1)."""
        return self._policy == "write_through" or node.hit_count >= SELECTIVE_HITS

    def take(self) -> TreeNode | None:
        """The next one, which leaves the queue; None when it is empty."""
        if not self._nodes:
            return None
        node = next(iter(self._nodes))
        del self._nodes[node]
        return node

    def put_back(self, node: TreeNode) -> None:
        """One that was taken and could not begin yet: behind all others."""
        self._nodes[node] = None

    def clear(self) -> None:
        """Forget all: the cache was flushed."""
        self._nodes.clear()

    def _add(self, node: TreeNode) -> None:
        if node.host_pages or node.parent is None or node in self._nodes:
            return
        if len(self._nodes) >= self._max_queued:
            self.dropped_tokens += missing_tokens(node)
            return
        self._nodes[node] = None


def missing_tokens(node: TreeNode) -> int:
    """Tokens on the path to ``node`` that the host has not. O(depth)."""
    missing = 0
    at = node
    while at.parent is not None and not at.host_pages:
        missing += len(at.key)
        at = at.parent
    return missing // TOKEN_BYTES
