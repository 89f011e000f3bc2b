"""One pin, what it asks of the tree, and how much may be pinned.

A pin is a *wish*: a prefix that should stay cached on one tier of this worker. It holds as much of it as the tier has, by a lock
like any other. Tokens are never shown: a pin is told by a digest.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import xxhash

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.namespace import short_digest
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import ConfigError
from prefixmesh.tokens import TOKEN_BYTES

DEFAULT_POOL_SHARE: Final = 0.3
"""Of a pool, what all pins together may have when nothing else is said: most of it stays for what is not pinned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinBudget:
    """How much may be pinned. Pages are those of the wishes, cached or missing, counted once per pin."""

    pages_per_owner: int | None = None
    """Most pages one owner's pins of a tier cover; None: no bound, unless ``for_pool`` puts one in."""

    pages_in_all: int | None = None
    """Most pages all pins cover; None: no bound, unless ``for_pool`` puts one in."""

    pins_per_owner: int = 256
    """Most pins of one owner. Pages bound what a pin takes from the device, this what it takes from the books (its tokens among
    them); and one owner's thousands of short pins leave others their places."""

    pins_in_all: int = 1024
    """Most pins at once. All of them may expire in one call, and all let go in a flush: at a few microseconds each, this is
    what bounds that pause."""

    pool_share: float = DEFAULT_POOL_SHARE
    """Of a pool, what ``pages_in_all`` is where nothing else is said."""

    owner_share: float = 1.0
    """Of a pool, what ``pages_per_owner`` is where nothing else is said; by default only ``pages_in_all`` binds."""

    def __post_init__(self) -> None:
        for name in ("pool_share", "owner_share"):
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} must be from 0 to 1, got {share}")
        for name in ("pages_per_owner", "pages_in_all", "pins_per_owner", "pins_in_all"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ConfigError(f"{name} must not be negative, got {limit}")

    def for_pool(self, pool_pages: int) -> "PinBudget":
        """This budget for a pool of so many pages: what has no bound gets its share of the pool."""
        in_all, per_owner = self.pages_in_all, self.pages_per_owner
        return replace(
            self,
            pages_in_all=int(pool_pages * self.pool_share) if in_all is None else in_all,
            pages_per_owner=int(pool_pages * self.owner_share) if per_owner is None else per_owner,
        )


class Held(NamedTuple):
    """How much of a key a tree has on a pin's tier, locked."""

    node: TreeNode
    """Where it ends; the root when there is nothing of it."""

    receipt: LockReceipt
    """A fresh lock of ``node``."""

    held_tokens: int
    """Tokens of the key up to there; whole pages."""

    next_edge: bytes | None
    """What ``node.children`` would know the child by that goes on with the key; None when the whole key is held."""


class PinnedTree(Protocol):
    """What a tree does for its pins of one tier."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    def can_hold(self, key: RadixKey) -> bool:
        """Whether the tree can divide where the key's public part ends."""
        ...

    def hold(self, key: RadixKey) -> Held:
        """Lock the longest prefix of ``key`` that is on the tier, making its end a node. A use for the order of eviction alone: no
        time, no hit."""
        ...

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock."""
        ...


class PinStatus(NamedTuple):
    """What may be told of a pin."""

    owner: str
    namespace: str
    """Short digest of the namespace."""
    digest: str
    """A name of the whole prefix, for people: two pins of one prefix have the same."""
    pages: int
    """Pages the whole wish covers: what its owner is charged."""
    held_tokens: int
    """Tokens that are cached on the pin's tier and cannot be evicted from it."""
    missing_tokens: int
    """Tokens that are not cached yet, or not any more."""
    expires_at: float | None
    """On the clock of the calls' ``now``; None: permanent."""
    tier: Tier = Tier.DEVICE
    """Where it is kept."""


class Pin:
    """One owner's wish for one prefix. Compared and hashed by identity."""

    __slots__ = ("digest", "expires_at", "held", "key", "owner", "pages", "tier")

    def __init__(self, key: RadixKey, owner: str, pages: int, tier: Tier = Tier.DEVICE) -> None:
        self.key = key
        """The prefix, whole pages."""
        self.owner = owner
        self.pages = pages
        """How many those are."""
        self.tier = tier
        self.digest = digest_of(key)
        self.expires_at: float | None = None
        """None: permanent."""
        self.held: Held | None = None
        """What it protects now. None only while a flush is on, and once the pin is gone."""

    def status(self) -> PinStatus:
        """What may be told of it. O(1)."""
        held_tokens = self.held.held_tokens if self.held else 0
        return PinStatus(
            owner=self.owner,
            namespace=short_digest(self.key.namespace),
            digest=self.digest,
            pages=self.pages,
            held_tokens=held_tokens,
            missing_tokens=len(self.key.tokens) // TOKEN_BYTES - held_tokens,
            expires_at=self.expires_at,
            tier=self.tier,
        )

    def __repr__(self) -> str:
        status = self.status()
        where = "" if self.tier is Tier.DEVICE else f"{self.tier.name.lower()}, "
        ends = "permanent" if self.expires_at is None else f"expires_at={self.expires_at:g}"
        return (
            f"Pin({self.owner!r}, {where}{status.namespace}/{self.digest}, pages={self.pages}, "
            f"held_tokens={status.held_tokens}, missing_tokens={status.missing_tokens}, {ends})"
        )


def digest_of(key: RadixKey) -> str:
    """A name of ``key`` for people and logs. The namespace, which nobody without the fleet's secret can make, is in it, so that
    the tokens cannot be guessed from it. O(length of the key)."""
    digest = xxhash.xxh3_64(key.namespace)
    digest.update(key.boundary_tokens.to_bytes(8, "little"))
    digest.update(key.tail)
    digest.update(key.tokens)
    return digest.hexdigest()
