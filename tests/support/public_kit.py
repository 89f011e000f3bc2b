"""A worker's radix cache for tests of public prefixes: tenants, pins, and requests that behave as the scheduler's do."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefixmesh.cache.base import InsertResult, MatchResult, RadixKey
from prefixmesh.cache.events import EventSink
from prefixmesh.cache.namespace import derive_namespace, public_namespace
from prefixmesh.cache.node import TreeNode, nodes_below
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.public import PublicPrefix, choose_key, public_boundary
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import TOKEN_BYTES, pack
from tests.support.cache_kit import as_pages, take

SECRET = bytes(range(32))
PUBLIC = public_namespace(SECRET, adapter_digest="", model_revision="r")


def tenant(name: str) -> Namespace:
    """A tenant's plain namespace."""
    return derive_namespace(SECRET, tenant=name, adapter_digest="", model_revision="r", caller_key="")


ACME, GLOBEX = tenant("acme"), tenant("globex")


class Heard(EventSink):
    """Every event in order, and the blocks that follow from them: bags, since a block is there once for each edge that it ends in,
    of which there are several where pages are longer than blocks and differ behind one."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Tier, Fingerprint | None, tuple[Fingerprint, ...]]] = []
        self.blocks: dict[Tier, Counter[Fingerprint]] = {tier: Counter() for tier in Tier}

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        self.events.append(("stored", tier, parent, tuple(fingerprints)))
        assert parent is None or parent in self.blocks[tier]
        self.blocks[tier].update(fingerprints)

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        self.events.append(("removed", tier, None, tuple(fingerprints)))
        assert self.blocks[tier] >= Counter(fingerprints)
        self.blocks[tier] -= Counter(fingerprints)

    def cleared(self) -> None:
        for blocks in self.blocks.values():
            blocks.clear()


@dataclass(frozen=True)
class Shape:
    """Page and block size, and token runs that are whole ``units`` of both."""

    page: int
    block: int

    @property
    def unit(self) -> int:
        """What boundaries are multiples of."""
        return math.lcm(self.page, self.block)

    def units(self, count: int, first: int = 0) -> list[int]:
        """So many units of ascending ids."""
        return list(range(first, first + count * self.unit))

    def pages(self, count: int, first: int) -> list[int]:
        """So many pages of ascending ids."""
        return list(range(first, first + count * self.page))

    def __str__(self) -> str:
        return f"page{self.page}-block{self.block}"


SHAPES = [Shape(1, 4), Shape(2, 4), Shape(16, 4), Shape(16, 64), Shape(4, 6)]
"""Pages smaller than a block, larger, and neither a multiple of the other."""


class Worker:
    """A radix cache with a host tier, and what it has been told to keep in public."""

    def __init__(
        self, shape: Shape, pages: int = 400, host_pages: int = 200, quotas: dict[str, Quota] | None = None
    ) -> None:
        self.shape = shape
        self.pool, self.host, self.heard = PageAllocator(pages), PageAllocator(host_pages), Heard()
        options = RadixOptions(
            host=self.host, block_size=shape.block, events=self.heard, quotas=quotas if quotas else {}
        )
        self.cache = RadixCache(self.pool, shape.page, options)

    def prefix(self, tokens: Sequence[int]) -> PublicPrefix:
        """The candidate that a public pin of these tokens gives."""
        cut = public_boundary(PUBLIC, pack(tokens), page_size=self.shape.page, block_size=self.shape.block)
        assert cut is not None
        return cut

    def key(
        self, namespace: Namespace, tokens: Sequence[int], candidates: Iterable[PublicPrefix]
    ) -> RadixKey:
        """The key that a request of this tenant chooses."""
        return choose_key(
            self.cache.peek,
            namespace,
            pack(tokens),
            candidates,
            page_size=self.shape.page,
            block_size=self.shape.block,
        )

    def compute(self, key: RadixKey, owner: str = "", now: float = 0.0) -> InsertResult:
        """A request computes what is not cached and inserts all, keeping no page."""
        match = self.cache.match_prefix(key, now)
        wanted = len(key.tokens) // TOKEN_BYTES // self.shape.page
        fresh = take(self.pool, wanted - len(match.device_indices))
        pages = as_pages([*match.device_indices.tolist(), *fresh.tolist()])
        return self.cache.insert(key, pages, now, owner=owner)

    def match(self, key: RadixKey) -> MatchResult:
        """A match, checked against a peek before it, and the invariants after it."""
        peeked = self.cache.peek(key)
        match = self.cache.match_prefix(key, 1.0)
        assert match.matched_tokens == peeked
        self.check()
        return match

    def matched(self, key: RadixKey) -> int:
        """Tokens of a key that are on the device."""
        return self.match(key).matched_tokens

    def nodes(self) -> list[TreeNode]:
        """All nodes, parents first."""
        return [node for _, node in nodes_below(self.cache._accounts.root)]

    def paid_by(self, name: str) -> int:
        """Device pages on somebody's account."""
        return sum(len(node.value) for node in self.nodes() if node.payer.name == name)

    def check(self, elsewhere: int = 0) -> None:
        """The tree's own rules, that its events tell of exactly its blocks, and that no page is lost but those that the test
        itself has."""
        self.cache.check_invariants()
        for tier in Tier:
            assert self.cache.blocks(tier) == self.heard.blocks[tier].keys()
        owned = len(self.cache.owned_pages())
        assert owned + self.pool.free_pages + elsewhere == self.pool.total_pages


def cut(key: RadixKey, tokens: int) -> RadixKey:
    """The same key, of its first tokens."""
    return key._replace(tokens=key.tokens[: tokens * TOKEN_BYTES])
