"""A worker that may have a prefix's KV, as the fleet names it to another one that wants to copy it."""

import msgspec

from prefixmesh.ids import Incarnation


class KvSource(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask, and for how much."""

    address: str
    """``host:port``."""

    incarnation: Incarnation
    """The life of it that is meant; another one is not asked."""

    tokens: int
    """Leading tokens that it is believed to hold."""

    boundary_tokens: int = 0
    """Of the key that it holds them under: 0 is the caller's own namespace, else a public boundary."""
