"""Which cache stands behind ``--prefix-cache``, and what explains its misses."""

from typing import Literal, assert_never

from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.hash_cache import HashCache
from prefixmesh.cache.misses import MissFinder
from prefixmesh.cache.no_cache import NoCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import DEFAULT_OPTIONS, RadixCache, RadixOptions
from prefixmesh.errors import ConfigError

CacheKind = Literal["radix", "hash", "off"]


def make_prefix_cache(
    kind: CacheKind, allocator: PageAllocator, page_size: int, options: RadixOptions = DEFAULT_OPTIONS
) -> PrefixCache:
    """The cache of this kind over ``allocator``'s pages. Raises ConfigError when it cannot have this page size or, as only the
    radix cache can, other ``options`` than the default."""
    if kind != "radix" and options != DEFAULT_OPTIONS:
        raise ConfigError(f"eviction_policy and other options are for prefix_cache=radix alone, not {kind}")
    match kind:
        case "radix":
            return RadixCache(allocator, page_size, options)
        case "hash":
            return HashCache(allocator, page_size)
        case "off":
            return NoCache(allocator, page_size)
        case _:
            assert_never(kind)


def miss_finder(cache: PrefixCache) -> MissFinder:
    """What tells why ``cache`` did not find a token; of caches that remember nothing it tells nothing but the tail."""
    return MissFinder(cache.peek, cache.seen if isinstance(cache, RadixCache) else None)


def block_size_of(cache: PrefixCache) -> int:
    """Tokens in a block of the fingerprints that ``cache`` tells of; the default of caches that tell of none."""
    return cache.block_size if isinstance(cache, RadixCache) else DEFAULT_BLOCK_SIZE
