"""The trees that are measured: one place that makes a cache with everything switched on, and one that fills it.

A *grove* of N leaves is what most figures are taken on: trunks of 64 tokens with four leaves of 64 tokens each, so N leaves are
N / 4 nodes more; half of the trunks belong to one owner and half to the other, each in its namespace. Tokens are random, from a
fixed seed.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from prefixmesh.cache.base import InsertResult, MatchResult, PageIndices, RadixKey
from prefixmesh.cache.event_log import LOG_EVENTS
from prefixmesh.cache.ledger import CacheLedger
from prefixmesh.cache.misses import MissFinder
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.errors import InternalError
from prefixmesh.ids import Epoch, Namespace
from prefixmesh.tokens import TOKEN_BYTES

LEAF_TOKENS: Final = 64
"""Tokens of a trunk and of a leaf: one block, so that each has a fingerprint."""

FANOUT: Final = 4
"""Leaves of a trunk: conversations that went on from one place."""

NOW: Final = 1.0
"""The caches are told the time and have none: the order of uses is that of the calls."""

PIN_TTL_S: Final = 1e6

SEED: Final = 20


class Owner(NamedTuple):
    """A tenant, and the namespace its tokens live in."""

    name: str
    namespace: Namespace


OWNERS: Final = (Owner("acme", Namespace(b"bench-ns-of-acme")), Owner("bolt", Namespace(b"bench-ns-of-bolt")))

FLOOR_SHARE: Final = 64
CEILING_SHARE: Final = 4
"""Each of the two owners has a floor of a 64th of the pool and a ceiling of three quarters: both are watched, neither binds."""

HOST_SHARE: Final = 8
"""The host tier has an eighth of the pool's pages; nothing is ever copied there."""


class BenchTree(NamedTuple):
    """A cache, the pool it works on, and what keeps the account of what requests find."""

    cache: RadixCache
    pages: PageAllocator
    ledger: CacheLedger
    misses: MissFinder
    publisher: CachePublisher

    def take(self, count: int, owner: Owner) -> PageIndices:
        """``count`` pages for a request, evicting when they are short: as a worker takes them."""
        missing = count - self.pages.free_pages
        if missing > 0:
            self.cache.evict(missing, owner.name)
        taken = self.pages.allocate(count)
        if taken is None:
            raise InternalError(f"the bench's pool is too small: {count} pages wanted of {self.cache!r}")
        return taken

    def put(self, owner: Owner, tokens: bytes) -> InsertResult:
        """Cache ``tokens`` as a request does that computes what is not cached."""
        key = RadixKey(owner.namespace, tokens)
        matched = self.cache.match_prefix(key, NOW).device_indices
        wanted = len(tokens) // TOKEN_BYTES // self.cache.page_size
        table = np.concatenate((matched, self.take(wanted - len(matched), owner)))
        return self.cache.insert(key, table, NOW, owner=owner.name)

    def match(self, owner: Owner, tokens: bytes) -> MatchResult:
        """What is cached of ``tokens``."""
        return self.cache.match_prefix(RadixKey(owner.namespace, tokens), NOW)


def make_tree(page_size: int, pool_pages: int, log_events: int = LOG_EVENTS) -> BenchTree:
    """A cache with everything switched on that a worker may switch on, and nothing in it but half of what is pinned.

    A publisher hears of every block; two owners have floors and ceilings; one pin ends at a far time and waits for its second
    half; there is a host tier; evicted blocks are remembered. ``log_events`` is how many events the publisher keeps.
    """
    epochs = itertools.count(SEED)
    pages = PageAllocator(pool_pages)
    quota = Quota(
        floor_pages=pool_pages // FLOOR_SHARE, ceiling_pages=pool_pages - pool_pages // CEILING_SHARE
    )
    publisher = CachePublisher(lambda: Epoch(next(epochs)), log_events=log_events)
    options = RadixOptions(
        host=PageAllocator(max(1, pool_pages // HOST_SHARE)),
        quotas={owner.name: quota for owner in OWNERS},
        events=publisher,
    )
    cache = RadixCache(pages, page_size, options)
    tree = BenchTree(cache, pages, CacheLedger(), MissFinder(cache.peek, cache.seen), publisher)
    owner, pinned = OWNERS[0], hashlib.shake_128(b"pinned").digest(2 * LEAF_TOKENS * TOKEN_BYTES)
    tree.put(owner, pinned[: LEAF_TOKENS * TOKEN_BYTES])
    cache.pins.add(RadixKey(owner.namespace, pinned), owner.name, NOW, PIN_TTL_S)
    return tree


class Grove:
    """A tree of many small leaves, and how to plant more of them."""

    def __init__(
        self, page_size: int, leaves: int, spare_tokens: int = 0, log_events: int = LOG_EVENTS
    ) -> None:
        """``spare_tokens`` is the room in its pool beside its leaves, for what the figures insert."""
        self.page_size = page_size
        self.leaves = leaves
        self.planted = 0
        """Leaves planted so far; some may have been evicted since."""
        self.rng = np.random.default_rng(SEED)
        pool_tokens = leaves * 2 * LEAF_TOKENS + spare_tokens
        self.tree = make_tree(page_size, pool_tokens // page_size, log_events)

    def plant_all(self) -> "Grove":
        """All its leaves; returns itself."""
        for _ in range(self.leaves):
            self.plant()
        return self

    def plant(self) -> None:
        """One more leaf, on the trunk that has fewer than four."""
        self.tree.put(*self.leaf(self.planted))
        self.planted += 1

    def leaf(self, number: int) -> tuple[Owner, bytes]:
        """Whose the leaf is, and the tokens from the root to its end: the same for the same number."""
        trunk = number // FANOUT
        tokens = _tokens_of(b"trunk", trunk) + _tokens_of(b"leaf", number)
        return OWNERS[trunk % len(OWNERS)], tokens

    def tokens(self, count: int) -> bytes:
        """So many new random tokens."""
        return self.rng.bytes(count * TOKEN_BYTES)


def _tokens_of(kind: bytes, number: int) -> bytes:
    """Random tokens that need not be remembered."""
    return hashlib.shake_128(b"%b %d" % (kind, number)).digest(LEAF_TOKENS * TOKEN_BYTES)


def copies(tokens: Sequence[bytes]) -> list[bytes]:
    """Equal tokens in memory of their own, as a later request brings them."""
    return [bytes(bytearray(one)) for one in tokens]
