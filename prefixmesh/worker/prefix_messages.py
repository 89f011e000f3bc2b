"""What the gRPC front and the engine say to each other about prefixes: pins, and KV that is read from the cache and written to it.

Each command is answered by one ``PrefixAnswer``. KV travels as bytes, in the order ``KvPart`` of the wire states.
"""

from typing import Literal

import msgspec

from prefixmesh.cache.base import RadixKey
from prefixmesh.ids import Namespace


class PrefixName(msgspec.Struct, frozen=True, array_like=True):
    """Tokens in a namespace, those behind a boundary in another: a ``RadixKey`` that travels."""

    namespace: bytes
    tokens: bytes
    """Packed."""

    boundary_tokens: int = 0
    tail: bytes = b""

    def key(self) -> RadixKey:
        """As the cache takes it. O(1)."""
        return RadixKey(Namespace(self.namespace), self.tokens, self.boundary_tokens, Namespace(self.tail))


class PinPrefix(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: keep a prefix. Known by this id already: the TTL begins anew; with another prefix, it is refused."""

    question: int
    pin_id: str
    prefix: PrefixName
    owner: str
    tier: int = 0
    """A ``Tier``."""

    ttl_s: float = 0.0
    """0: until it is let go."""


class UnpinPrefix(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: let go of a pin."""

    question: int
    pin_id: str


class ListPins(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: send all pins, or one."""

    question: int
    pin_id: str = ""
    """The only one that is wanted; empty: all are."""


class ListHotPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: send the prefixes that are used most, none inside another."""

    question: int
    max_prefixes: int
    max_tokens: int


class ReadKv(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: send KV of a prefix from ``start_tokens`` on, as much as is there, whole pages, ``max_bytes`` at most."""

    question: int
    prefix: PrefixName
    start_tokens: int
    max_bytes: int


class WriteKv(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: put KV of the tokens from ``start_tokens`` to the end of ``prefix`` into the cache. Without KV: only tell how much of
    the prefix is there."""

    question: int
    prefix: PrefixName
    start_tokens: int
    kv: bytes = b""
    owner: str = ""
    flushes: int = 0
    """What ``KvWritten`` said when the copy began: after another flush, nothing that was read before it is taken."""


PrefixCommand = PinPrefix | UnpinPrefix | ListPins | ListHotPrefixes | ReadKv | WriteKv
"""What is answered by a ``PrefixAnswer``."""


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One pin, as it is now."""

    pin_id: str
    owner: str
    tier: int
    pages: int
    held_tokens: int
    missing_tokens: int
    expires_in_s: float = 0.0
    """0: it does not."""


class PinTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What all pins of the device take, and may; and what those of the host may, 0 without one."""

    charged_pages: int
    budget_pages: int
    owner_budget_pages: int
    version: int
    host_budget_pages: int = 0
    host_owner_budget_pages: int = 0


class KvRead(msgspec.Struct, frozen=True, kw_only=True):
    """KV as it lies in the cache."""

    held_tokens: int
    """Leading tokens of the prefix that are there, whole pages."""

    kv: bytes = b""
    """From the start that was asked for; empty where nothing is there."""


class KvWritten(msgspec.Struct, frozen=True, kw_only=True):
    """What a write came to."""

    held_tokens: int
    """Leading tokens of the prefix that are on the device now, whole pages: the end of what was written, or less, where something before it
    was evicted meanwhile, or no page could be had."""

    host_tokens: int = 0
    """Of a command without KV: what only the host has behind them."""

    flushes: int = 0
    """How often the cache was emptied until now."""


class HotPrefixInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that is used much."""

    prefix: PrefixName
    hits: int
    owner: str
    adapter: str = ""
    """Digest of the LoRA adapter that its KV is computed with; empty for the base model."""


PrefixProblem = Literal["invalid", "not_found", "over_budget", "unsupported", "failed"]


class PrefixAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to one ``PrefixCommand``."""

    question: int
    error: PrefixProblem | None = None
    """Set when it was refused; ``field`` and ``problem`` say why."""

    field: str = ""
    problem: str = ""
    pins: tuple[PinInfo, ...] = ()
    """The pin that was made; those that a list wants; none after an unpin of one that was not there."""

    made: bool = False
    """Of a ``PinPrefix``: there was no pin of this id before."""

    totals: PinTotals | None = None
    hot: tuple[HotPrefixInfo, ...] = ()
    read: KvRead | None = None
    written: KvWritten | None = None
