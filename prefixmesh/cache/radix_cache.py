"""The radix prefix cache: a tree over packed tokens that finds *any* common prefix, cut to whole pages.

An edge is a run of whole pages; a node holds the indices of the pages with its KV, never KV. A node's children are found by
the bytes of their first page, so two edges that leave a node differ within their first page, and a walk does one dictionary
look-up and one memory comparison per node, however long its edge. Where a namespace begins (at the root, and below the node at
which a public prefix ends) the namespace stands before the first page's bytes: equal tokens of two namespaces never share a
node.

This file says what each operation does, in which order. The books are ``accounting``'s and ``host_tier``'s, the order ``owners``'
and ``eviction``'s; what a key finds is ``walk``'s, what comes ``grower``'s, what goes ``evictor``'s; ``pins`` and ``transfers`` are
parts of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, get_args

from prefixmesh.cache.accounting import NO_QUOTAS, PageAccounts
from prefixmesh.cache.base import InsertResult, MatchResult, PageIndices, RadixKey, TierTokens
from prefixmesh.cache.drawing import draw
from prefixmesh.cache.events import NO_EVENTS, EventSink
from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.evictor import Evictor
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.grower import Grower
from prefixmesh.cache.host_tier import HostFigures, HostTier
from prefixmesh.cache.hot_prefixes import HotPrefix, hot_prefixes
from prefixmesh.cache.invariants import check_radix, owned_pages, summary
from prefixmesh.cache.node import (
    INDEX_BYTES,
    NO_PAGES,
    TreeNode,
    nodes_below,
    pack_pages,
    unpack_pages,
)
from prefixmesh.cache.owners import NOBODY, Quota, Rank
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pin_holds import DeviceHolds, HostHolds
from prefixmesh.cache.pin_invariants import check_pinned_pages
from prefixmesh.cache.pins import PinBudget, PinTable
from prefixmesh.cache.seen_blocks import SeenBlocks
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Transfers, TreeCalls
from prefixmesh.cache.walk import edge_name, step, walk_device
from prefixmesh.errors import ConfigError, InternalError
from prefixmesh.ids import Fingerprint
from prefixmesh.tokens import TOKEN_BYTES

MAX_PAGE_SIZE: Final = 256
"""Beyond it, most prompts would end inside their first page and share nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RadixOptions:
    """What a radix cache may have beside its pages."""

    host: PageAllocator | None = None
    """The host tier's pages; None for no host tier."""
    policy: EvictionPolicy = "lru"
    """In which order each payer's nodes are given up, on both tiers."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens in a block, the unit of fingerprints and events."""
    quotas: Mapping[str, Quota] = field(default_factory=lambda: NO_QUOTAS)
    """Floors and ceilings by payer, in device pages."""
    host_quotas: Mapping[str, Quota] = field(default_factory=lambda: NO_QUOTAS)
    """The same in host pages."""
    pin_budget: PinBudget = field(default_factory=PinBudget)
    """How much may be pinned on the device; without a bound in all, a share of the pool."""
    host_pin_budget: PinBudget = field(default_factory=PinBudget)
    """The same on the host, in host pages."""
    events: EventSink = NO_EVENTS
    """Told of every whole block that comes to a tier or leaves it."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.policy not in get_args(EvictionPolicy):
            raise ConfigError(f"policy must be one of {get_args(EvictionPolicy)}, got {self.policy!r}")


DEFAULT_OPTIONS: Final = RadixOptions()


class RadixCache:
    """Prefix cache with edges of any length. Implements ``PrefixCache``; not thread-safe.

    * look up: ``match_prefix``, ``peek``, ``peek_tiers``
    * keep: ``insert``, ``lock``, ``release``, ``pins``
    * give up: ``evict``, ``evict_host``, ``flush``
    * move between the tiers: ``transfers``
    * look at: ``evictable_pages``, ``protected_pages``, ``owned_pages``, ``blocks``, ``hot_prefixes``, ``seen``, ``render``, ``check_invariants``
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, options: RadixOptions = DEFAULT_OPTIONS
    ) -> None:
        """Raises ConfigError for a page size that is not within 1 to ``MAX_PAGE_SIZE``."""
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ConfigError(f"page_size must be 1 to {MAX_PAGE_SIZE}, got {page_size}")
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._block_size = options.block_size
        self._events = options.events
        self._host = (
            None if options.host is None else HostTier(options.host, options.policy, options.host_quotas)
        )
        self._accounts = PageAccounts(allocator, options.policy, options.quotas, self._host)
        self.seen = SeenBlocks(options.block_size)
        """What was evicted, and who else has a prompt's first block: why a later request misses."""
        self._grower = Grower(self._accounts, page_size, options.block_size, self._events, self.seen)
        self._evictor = Evictor(self._accounts, page_size, options.block_size, self._events, self.seen)
        self.lock = self._accounts.lock
        """``lock(node)``: protect ``node`` and its ancestors on the device until the receipt is released. O(depth). Raises
        InternalError for a node that is no longer on the device. Nodes and receipts are for the cache alone that gave them."""
        self.release = self._accounts.release
        """``release(receipt)``: undo one lock. O(depth). Raises DoubleReleaseError, changing nothing, the second time."""
        holds = DeviceHolds(self._accounts, self._grower, page_size, self.can_hold)
        self.pins = PinTable(holds, options.pin_budget.for_pool(allocator.total_pages))
        """Prefixes that stay on the device, by owner; pinning counts as a use for the order of eviction."""
        self.host_pins: PinTable | None = None
        """Prefixes whose copy stays on the host; None without a host tier."""
        self._transfers: Transfers | None = None
        if self._host is not None:
            host_holds = HostHolds(self._accounts, self._host, self._grower, page_size, self.can_hold)
            budget = options.host_pin_budget.for_pool(self._host.allocator.total_pages)
            self.host_pins = PinTable(host_holds, budget, Tier.HOST, beside=self.pins)
            calls = TreeCalls(
                make_room=self._make_room,
                evict_host=self._make_way,
                shed=partial(self._evictor.shed, self._host),
                demote_path=self._evictor.demote_path,
                gained=self._gained,
                part_of=self._grower.part_of,
                insert=self.insert,
                can_hold=self.can_hold,
            )
            self._transfers = Transfers(self._accounts, self._host, self._page_bytes, self._events, calls)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def evictable_pages(self) -> int:
        """Cached device pages that nothing locks and no floor keeps. O(1), O(floors) with quotas."""
        return self._accounts.evictable_pages

    def evictable_for(self, owner: str) -> int:
        """Device pages that ``evict`` could free for ``owner``; see ``PageAccounts.evictable_for`` for when it is less."""
        return self._accounts.evictable_for(owner)

    @property
    def protected_pages(self) -> int:
        """Device pages that a lock or a floor protects, those cut off by a flush and still read among them. O(floors)."""
        return self._accounts.cached_pages - self._accounts.evictable_pages

    @property
    def pinned_pages(self) -> int:
        """Device pages that a pin protects, each once. O(1)."""
        return self.pins.pinned_pages

    @property
    def copying_pages(self) -> int:
        """Device pages that belong to restores and fetches in flight. O(1)."""
        return 0 if self._transfers is None else self._transfers.destination_pages(Tier.DEVICE)

    @property
    def host_pages(self) -> int:
        """Host pages that hold readable copies. O(1)."""
        return 0 if self._host is None else self._host.cached_pages

    @property
    def host_protected_pages(self) -> int:
        """Those of them that a copy in flight or a pin protects. O(1)."""
        return 0 if self._host is None else self._host.protected_pages

    @property
    def host_figures(self) -> HostFigures:
        """Where the host tier's pages are; all 0 without one. O(1), O(floors) with quotas."""
        if self._host is None or self._transfers is None:
            return HostFigures()
        return self._host.figures(self._transfers.destination_pages(Tier.HOST))

    @property
    def double_releases(self) -> int:
        """Receipts that somebody tried to release again; only rises."""
        return self._accounts.double_releases

    @property
    def node_count(self) -> int:
        """Nodes in the tree. O(1)."""
        return self._accounts.node_count

    def pins_on(self, tier: Tier) -> PinTable:
        """The prefixes that stay on this tier; the device's are ``pins``. Raises InternalError for a host tier that is not there."""
        pins = self.pins if tier is Tier.DEVICE else self.host_pins
        if pins is None:
            raise InternalError("this cache has no host tier")
        return pins

    @property
    def transfers(self) -> Transfers:
        """Copies between the tiers. Raises InternalError without a host tier."""
        if self._transfers is None:
            raise InternalError("this cache has no host tier")
        return self._transfers

    def match_prefix(self, key: RadixKey, now: float, priority: int = 0, *, hits: int = 1) -> MatchResult:
        """Longest cached prefix of ``key``, in whole pages; O(depth) look-ups and O(matched) bytes.

        Splits the edge in which the match ends, so that exactly the match can be locked, and counts as a use of its path, by
        a user of this priority, and as so many hits. Locks nothing: lock ``last_device_node`` before anything else may evict.
        """
        if now >= self.pins.next_expiry:
            self.pins.expire(now)
        node, runs, position, inside, shared = walk_device(self._accounts.root, key, self._page_bytes)
        last = node = node if inside is None else self._grower.part_of(inside, shared)
        host_bytes = 0
        if self._host is not None and self._host.cached_pages and inside is None:
            last, host_bytes = self._match_host(node, key, position)
        if priority > last.priority:
            self._accounts.raise_priority(last, priority)
        self._accounts.touch(last, now, hits)
        indices = unpack_pages(b"".join(runs))
        return MatchResult(indices, position // TOKEN_BYTES, node, last, host_bytes // TOKEN_BYTES)

    def peek(self, key: RadixKey) -> int:
        """Tokens that ``match_prefix`` would find on the device; neither splits nor touches. Same cost."""
        _, _, position, _, _ = walk_device(self._accounts.root, key, self._page_bytes)
        return position // TOKEN_BYTES

    def peek_tiers(self, key: RadixKey) -> TierTokens:
        """What ``match_prefix`` would find on each tier: on the device, and beyond that on the host alone. As ``peek``."""
        node, _, position, inside, _ = walk_device(self._accounts.root, key, self._page_bytes)
        device_bytes = position
        while inside is None and (taken := step(node, key, position, self._page_bytes)) is not None:
            node = taken.child
            position += taken.shared_bytes
            if taken.shared_bytes < len(node.key):
                break
        return TierTokens(device_bytes // TOKEN_BYTES, (position - device_bytes) // TOKEN_BYTES)

    def insert(
        self, key: RadixKey, pages: PageIndices, now: float, *, priority: int = 0, owner: str = NOBODY
    ) -> InsertResult:
        """Cache ``key`` cut to whole pages; see ``PrefixCache.insert`` for who owns which page afterwards.

        What is new is on ``owner``'s account, before a public boundary on ``NOBODY``'s. O(depth) look-ups and O(length)
        bytes. Raises InternalError, changing nothing, when ``pages`` is shorter than the key, when a boundary is not at whole
        pages and blocks, or when one of the duplicates it would free is free already.
        """
        page_bytes = self._page_bytes
        accounts = self._accounts
        wanted = len(key.tokens) // page_bytes
        if len(pages) < wanted:
            raise InternalError(f"insert of {wanted} pages of tokens with {len(pages)} pages of KV")
        if key.boundary_tokens:
            self._check_boundary(key)
        if accounts.detached and (cut_off := accounts.detached_end(pages)) is not None:
            return InsertResult(0, 0, NO_PAGES, cut_off)
        if now >= self.pins.next_expiry:
            self.pins.expire(now)
        node, runs, position, inside, shared = walk_device(accounts.root, key, page_bytes)
        # key:    | cached: on the device already    | new: host nodes, then leaves | short of a page: not kept
        # pages:  0 ..................... cached-1   cached ............... wanted-1   wanted ...
        # owner:  the tree's own, or a duplicate     the caller's, now the tree's     the caller's still
        cached = position // page_bytes
        packed = pack_pages(pages if len(pages) == wanted else pages[:wanted])
        if cached:
            packed = self._share(packed, runs)
        first = node = node if inside is None else self._grower.part_of(inside, shared)
        if cached < wanted:
            fresh = packed[cached * INDEX_BYTES :]
            node = self._grower.grow(node, key, position, fresh, now, priority, owner)
            accounts.touch(node, now, 0)
            if self.pins.waiting:
                self.pins.grown(first, edge_name(key, position, page_bytes))
        else:
            if priority > node.priority:
                accounts.raise_priority(node, priority)
            accounts.touch(node, now, 0)
        return InsertResult(position // TOKEN_BYTES, wanted * self._page_size, unpack_pages(packed), node)

    def can_hold(self, key: RadixKey) -> bool:
        """Whether a key's boundary, if it has one, is where the tree can divide: at whole pages and blocks. O(1)."""
        at = key.boundary_tokens
        if not at:
            return True
        whole = at > 0 and not at % self._page_size and not at % self._block_size
        return whole and len(key.tail) == len(key.namespace)

    def evict(self, pages: int, owner: str = NOBODY) -> int:
        """Free exactly ``pages`` device pages, or all that ``owner`` may have when that is less; returns how many.

        In the order of ``owners`` and of the policy; a parent follows once it is a leaf; the last leaf is cut from its end
        rather than given up whole; what the host has too is only demoted. O(nodes given up + length of the last one), however
        many there are, and O(log payers) each.
        """
        return self._evictor.evict(pages, owner)

    def evict_host(self, pages: int, owner: str = NOBODY) -> int:
        """As ``evict`` for host pages: what is on the device too only loses its copy. 0 without a host tier."""
        return 0 if self._host is None else self._evictor.evict_host(self._host, pages, owner)

    def flush(self) -> None:
        """Forget everything: unlocked pages are free at once, locked ones when their receipts are released; pins stay, as
        wishes that are wholly missing. Begins a new epoch. O(nodes)."""
        for pins in self.pins.together:
            pins.let_go()
        self._accounts.detach_all()
        self._events.cleared()
        self.seen.cleared()
        for pins in self.pins.together:
            pins.hold_again()

    def hot_prefixes(self, now: float, *, max_prefixes: int, max_tokens: int) -> list[HotPrefix]:
        """The prefixes that are used most, on whichever tier, none inside another (``hot_prefixes``): some milliseconds at most."""
        root, page_bytes = self._accounts.root, self._page_bytes
        return hot_prefixes(root, page_bytes, now, max_prefixes=max_prefixes, max_tokens=max_tokens)

    def owned_pages(self, tier: Tier = Tier.DEVICE) -> PageIndices:
        """Every page of a tier that this cache owns, copies in flight among them, in no order. O(pages)."""
        return owned_pages(self._accounts, self._transfers, tier)

    def blocks(self, tier: Tier) -> set[Fingerprint]:
        """Fingerprints of all whole blocks on a tier, from the nodes themselves. O(nodes + blocks)."""
        nodes = (node for _, node in nodes_below(self._accounts.root))
        on_tier = (node for node in nodes if (node.on_device if tier is Tier.DEVICE else node.on_host))
        return {fingerprint for node in on_tier for fingerprint in node.hash_value}

    def check_invariants(self) -> None:
        """Recompute every count from nothing; raises InvariantError with the tree drawn. O(nodes + pages + tokens)."""
        check_radix(self._accounts, self._transfers, self._page_bytes, self._block_size)
        for pins in self.pins.together:
            pins.check_invariants()
            check_pinned_pages(pins, self._accounts)
        self.seen.check_invariants(self.blocks(Tier.DEVICE) | self.blocks(Tier.HOST))

    def render(self) -> str:
        """The tree as text: lengths, pages on each tier, locks, pins, copies in flight. Tokens are not shown."""
        return draw(self._accounts, () if self._transfers is None else self._transfers.in_flight)

    def __repr__(self) -> str:
        pins = f", pins={len(self.pins)}" if len(self.pins) else ""
        return f"RadixCache(page_size={self._page_size}, {summary(self._accounts)}{pins})"

    def _match_host(self, node: TreeNode, key: RadixKey, position: int) -> tuple[TreeNode, int]:
        """Go on from where the device ends: the last node that matches on the host alone, made by a split if need be, and how
        many bytes lie between."""
        start = position
        while (taken := step(node, key, position, self._page_bytes)) is not None:
            node = self._grower.part_of(taken.child, taken.shared_bytes)
            position += taken.shared_bytes
            if node is not taken.child:
                break
        return node, position - start

    def _share(self, given: bytes, shared_runs: list[bytes]) -> bytes:
        """The caller's packed pages with the tree's in place of the first ones, which are given back where they are others."""
        shared = b"".join(shared_runs)
        if given.startswith(shared):
            return given
        ours, theirs = unpack_pages(shared), unpack_pages(given[: len(shared)])
        self._accounts.allocator.free(theirs[theirs != ours])
        return shared + given[len(shared) :]

    def _check_boundary(self, key: RadixKey) -> None:
        if not self.can_hold(key):
            raise InternalError(
                f"a boundary at {key.boundary_tokens} tokens is not at whole pages of {self._page_size} and blocks of "
                f"{self._block_size}, or the tail has no namespace"
            )

    def _make_room(self, pages: int, owner: str) -> PageIndices | None:
        """For ``transfers``: so many device pages, evicting if need be; None when that is not enough, having evicted nothing unless
        ``evictable_for`` promised too much."""
        allocator = self._accounts.allocator
        missing = pages - allocator.free_pages
        if missing > 0 and (self.evictable_for(owner) < missing or self.evict(missing, owner) < missing):
            return None
        return allocator.allocate(pages)

    def _make_way(self, pages: int, owner: str, newcomer: Rank, taken: int) -> int:
        """For ``transfers``: free host pages, but of what the policy would give up for the newcomer alone."""
        assert self._host is not None
        return self._evictor.evict_host(self._host, pages, owner, newcomer, taken)

    def _gained(self, tier: Tier, node: TreeNode) -> None:
        """For ``transfers``: a node has come to this tier."""
        pins = self.pins.together[tier]
        if pins.waiting and node.parent is not None:
            pins.grown(node.parent, node.edge)
