"""Bytes that a node of the tree takes beside its arrays.

Built under ``tracemalloc``, which counts what was asked of the allocators, numpy's included (they round up by 8 bytes or so).
*Left out* is what grows with the tokens and would be there in any form of cache:

* the packed tokens of the edge (4 bytes a token),
* the page indices of its value (4 bytes a page),
* the fingerprints: 8 bytes in the tuple and the integer itself, per block that ends in the node.

*Counted* is everything else that is there because there is a node: the object with its times and counters, the headers of those
arrays and tuples, the name by which the parent knows it and its entry in the parent's dictionary, that dictionary, its entry in
the line of eviction, and its block's entries in the publisher's books and, for a prompt's first block, in the table of those.
What has a size of its own is not counted: the pool's arrays are made before, and the publisher's log of events, which holds
thousands, is cut to a few.
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Final, NamedTuple

from prefixmesh.bench.trees import Grove
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.tokens import TOKEN_BYTES

PAGE_INDEX_BYTES: Final = 4
"""Page indices are int32."""

FINGERPRINT_BYTES: Final = 8 + sys.getsizeof(2**64 - 1)
"""A place in a tuple, and the integer in it."""

FEW_EVENTS: Final = 16


class NodeMemory(NamedTuple):
    """What a grove takes."""

    nodes: int
    tokens: int
    total_bytes: int
    array_bytes: int
    """The part that is left out of ``bytes_per_node``."""

    @property
    def bytes_per_node(self) -> float:
        """Beside the arrays."""
        return (self.total_bytes - self.array_bytes) / self.nodes

    @property
    def bytes_per_token(self) -> float:
        """In all, arrays too."""
        return self.total_bytes / self.tokens


def measure_memory(page_size: int, leaves: int, plant: Callable[[Grove], object] = Grove.plant) -> NodeMemory:
    """Plant ``leaves`` leaves and see what memory that took. O(leaves), several times slower than planting."""
    grove = Grove(page_size, leaves, log_events=FEW_EVENTS)
    cache = grove.tree.cache
    nodes_before, pages_before = cache.node_count, _cached_pages(cache)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(leaves):
            plant(grove)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    pages = _cached_pages(cache) - pages_before
    arrays = pages * (page_size * TOKEN_BYTES + PAGE_INDEX_BYTES)
    arrays += len(cache.blocks(Tier.DEVICE)) * FINGERPRINT_BYTES
    return NodeMemory(cache.node_count - nodes_before, pages * page_size, after - before, arrays)


def _cached_pages(cache: RadixCache) -> int:
    return cache.evictable_pages + cache.protected_pages
