"""Which cache stands behind ``--prefix-cache``."""

from typing import Literal, assert_never

from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.hash_cache import HashCache
from prefixmesh.cache.no_cache import NoCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache

CacheKind = Literal["radix", "hash", "off"]


def make_prefix_cache(kind: CacheKind, allocator: PageAllocator, page_size: int) -> PrefixCache:
    """The cache of this kind over ``allocator``'s pages. Raises ConfigError when it cannot have this page size."""
    match kind:
        case "radix":
            return RadixCache(allocator, page_size)
        case "hash":
            return HashCache(allocator, page_size)
        case "off":
            return NoCache(allocator, page_size)
        case _:
            assert_never(kind)
