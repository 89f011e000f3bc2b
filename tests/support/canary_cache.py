"""The real radix cache, watched from outside: what it takes in, what it hands out, and what lies in its tree is read."""

from typing import Any

import numpy as np

from prefixmesh.cache.base import InsertResult, MatchResult
from prefixmesh.cache.namespace import NAMESPACE_BYTES
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.tokens import TOKEN_BYTES, unpack
from tests.support.canary_pool import CanaryAllocator, CanaryPool, Chain, Rows, U64Array, mix, seed_of


class CanaryCache(RadixCache):
    """Reads the pages of every match, on both tiers, and of every insert, going in and coming out."""

    def __init__(
        self,
        allocator: CanaryAllocator,
        options: RadixOptions | None = None,
        *,
        host: CanaryPool | None = None,
    ) -> None:
        super().__init__(allocator, allocator.pool.page_size, options or RadixOptions())
        self._device_pool, self._host_pool = allocator.pool, host
        self.duplicate_pages = 0
        """Pages that inserts freed because their tokens were cached in others."""
        self.evicted_pages = 0

    # The signatures are RadixCache's, whatever they are.

    def match_prefix(self, *args: Any, **kwargs: Any) -> MatchResult:
        result = super().match_prefix(*args, **kwargs)
        chain = Chain.of_key(args[0])
        self._device_pool.read_pages(result.device_indices, chain)
        if result.host_hit_length:
            assert self._host_pool is not None
            nodes = [result.last_host_node]
            while (parent := nodes[-1].parent) is not result.last_device_node:
                assert parent is not None, "the host's match does not go on from the device's"
                nodes.append(parent)
            pages = np.concatenate([node.host_value for node in reversed(nodes)])
            assert len(pages) * self.page_size == result.host_hit_length
            self._host_pool.read_pages(pages, chain, start=result.matched_tokens)
        return result

    def insert(self, *args: Any, **kwargs: Any) -> InsertResult:
        key, pages = args[0], args[1]
        chain = Chain.of_key(key)
        whole = chain.length // self.page_size
        before = self._device_pool.slots(pages[:whole])
        self._device_pool.expect(before, chain.rows(0, len(before)))
        result = super().insert(*args, **kwargs)
        shared = result.device_indices
        self.duplicate_pages += int(np.count_nonzero(shared != pages[: len(shared)]))
        self._device_pool.publish(shared)
        self._device_pool.read_pages(shared, chain)
        return result

    def evict(self, *args: Any, **kwargs: Any) -> int:
        evicted = super().evict(*args, **kwargs)
        self.evicted_pages += evicted
        return evicted

    def read_tree(self) -> None:
        """Read every page of every node, on each tier it is on. O(tokens)."""
        none = np.zeros(1, dtype=np.uint64)
        stack = [(child, none, none[0]) for child in _children(self._accounts.root)]
        while stack:
            node, sums, seed = stack.pop()
            if len(node.edge) > self.page_size * TOKEN_BYTES:  # a namespace begins here
                seed = seed_of(node.edge[:NAMESPACE_BYTES])
            rows = _rows(node, sums, seed)
            for pool, pages in ((self._device_pool, node.value), (self._host_pool, node.host_value)):
                if pool is not None and len(pages):
                    pool.read(pool.slots(pages), rows)
            last = rows.digests[-1:] - seed
            stack.extend((child, last, seed) for child in _children(node))


def _children(node: TreeNode) -> list[TreeNode]:
    return list((node.children or {}).values())


def _rows(node: TreeNode, before: U64Array, seed: np.uint64) -> Rows:
    """What the slots of a node's edge should hold, behind a prefix whose tokens add up to ``before``."""
    tokens = unpack(node.key)
    positions = np.arange(node.start, node.start + len(tokens))
    sums = np.cumsum(mix(positions, tokens), dtype=np.uint64) + before
    seeds = np.full(len(tokens), seed, dtype=np.uint64)
    return Rows(seeds, positions, tokens, sums + seeds)
