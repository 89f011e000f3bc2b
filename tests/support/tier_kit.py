"""A tree with a host tier, for tests that say step by step what comes to which tier."""

from typing import Any

from prefixmesh.cache.base import MatchResult, PageIndices
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.walk import walk_device
from prefixmesh.tokens import TOKEN_BYTES
from tests.support.cache_kit import key_of, take


class Tree:
    """A tree with a host tier."""

    def __init__(self, device: int = 30, host: int = 30, page_size: int = 1, **options: Any) -> None:
        """``options`` are those of ``RadixOptions``."""
        self.device, self.host = PageAllocator(device), PageAllocator(host)
        self.cache = RadixCache(self.device, page_size, RadixOptions(host=self.host, block_size=2, **options))
        self.now = 0.0

    def take(self, pages: int) -> PageIndices:
        """Device pages for what is computed."""
        return take(self.device, pages)

    def put(self, *tokens: int, owner: str = "") -> list[int]:
        """Insert a prompt computed into pages of its own; returns the pages that hold it."""
        self.now += 1
        pages = self.take(len(tokens) // self.cache.page_size)
        result = self.cache.insert(key_of(tokens), pages, self.now, owner=owner)
        self.check()
        return [int(page) for page in result.device_indices]

    def match(self, *tokens: int) -> MatchResult:
        self.now += 1
        match = self.cache.match_prefix(key_of(tokens), self.now)
        self.check()
        return match

    def node(self, *tokens: int) -> TreeNode:
        """Where these tokens, all on the device, end; no use of them."""
        page_bytes = self.cache.page_size * TOKEN_BYTES
        node, _, found, inside, _ = walk_device(self.cache._accounts.root, key_of(tokens), page_bytes)
        assert inside is None
        assert found == len(tokens) * TOKEN_BYTES
        return node

    def found(self, *tokens: int) -> tuple[int, int]:
        """Tokens on the device, and beyond them on the host."""
        match = self.match(*tokens)
        return match.matched_tokens, match.host_hit_length

    def back_up(self, *tokens: int) -> None:
        """Copy a prompt to the host, at once."""
        copy = self.cache.transfers.begin_offload(self.match(*tokens).last_device_node)
        assert copy is not None
        self.check()
        self.cache.transfers.finish_offload(copy)
        self.check()

    def demote(self, *tokens: int) -> None:
        """Insert a prompt and leave it on the host alone."""
        self.put(*tokens)
        self.back_up(*tokens)
        self.evict(30)
        assert self.found(*tokens) == (0, len(tokens))

    def evict(self, pages: int) -> int:
        freed = self.cache.evict(pages)
        self.check()
        return freed

    def check(self) -> None:
        self.cache.check_invariants()
        cache, device = self.cache, self.device
        cached = cache.evictable_pages + cache.protected_pages + cache.copying_pages
        assert device.free_pages + cached == device.total_pages
        figures = cache.host_figures
        assert sum(figures[1:]) == figures.total == self.host.total_pages
        owned = cache.owned_pages(Tier.HOST)
        self.host.check_invariants({"cache": owned})

    def check_at_rest(self) -> None:
        """No lock is left, and everything can be given up."""
        cache = self.cache
        assert (cache.host_protected_pages, cache.copying_pages) == (0, 0)
        cache.evict_host(self.host.total_pages)
        cache.evict(self.device.total_pages)
        self.check()
        assert self.device.free_pages == self.device.total_pages
        assert self.host.free_pages == self.host.total_pages
