"""What tests of caches say again and again: keys, and a prompt computed and inserted."""

from collections.abc import Sequence

import numpy as np

from prefixmesh.cache.base import InsertResult, PageIndices, PrefixCache, RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack

NS_A = Namespace(b"a" * 16)
NS_B = Namespace(b"b" * 16)


def key_of(tokens: Sequence[int], namespace: Namespace = NS_A) -> RadixKey:
    """The key of these token ids."""
    return RadixKey(namespace, pack(tokens))


def insert_prompt(
    cache: PrefixCache,
    allocator: PageAllocator,
    tokens: Sequence[int],
    *,
    namespace: Namespace = NS_A,
    now: float = 0.0,
) -> InsertResult:
    """Insert a prompt as a request would that reuses what is cached and computes the rest; keeps no page of its own."""
    key = key_of(tokens, namespace)
    match = cache.match_prefix(key, now)
    total = len(tokens) // cache.page_size
    fresh = take(allocator, total - len(match.device_indices))
    pages = [*match.device_indices.tolist(), *fresh.tolist()]
    result = cache.insert(key, as_pages(pages), now)
    allocator.free(as_pages(pages[max(result.inserted_tokens, match.matched_tokens) // cache.page_size :]))
    return result


def take(allocator: PageAllocator, n: int) -> PageIndices:
    """So many pages, which the test's pool must have."""
    pages = allocator.allocate(n)
    assert pages is not None, "the test's pool is too small"
    return pages


def as_pages(pages: Sequence[int]) -> PageIndices:
    """Page indices of the type that caches take."""
    return np.array(pages, dtype=np.int32)
