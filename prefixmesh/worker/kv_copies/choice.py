"""Whom to copy a prefix from, whether that is worth it, and for how long to wait. Pure.

A router names sources by what it believes; here that is weighed again, by what this worker has and how fast it is by its own measure.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixmesh.addresses import is_address
from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.worker.engine_stats import Stats

MAX_SOURCES: Final = 4
"""That are tried, one after the other: a prefix that four workers do not give is not held by the fifth either."""

BEGIN_MS: Final = 5.0
"""To begin a copy, whatever its length: to connect, to ask, and to be answered between two steps at either end."""

LEAST_PATIENCE_MS: Final = 250.0
"""A short prefix is waited for so long all the same: longer than any one step takes as a rule."""


class Found(NamedTuple):
    """What of a prefix is here already."""

    device_tokens: int
    host_tokens: int
    """Behind them, what only the host has."""

    @property
    def tokens(self) -> int:
        """All of it."""
        return self.device_tokens + self.host_tokens


def order(sources: Sequence[KvSource], own: Incarnation) -> list[KvSource]:
    """Those that can be asked, in the order in which they are given: each address once, and never this life of this worker."""
    chosen: dict[str, KvSource] = {}
    for source in sources:
        if source.incarnation != own and source.tokens > 0 and is_address(source.address):
            chosen.setdefault(source.address, source)
    return list(chosen.values())[:MAX_SOURCES]


def computing_ms(found: Found, end: int, stats: Stats | None) -> float:
    """What it takes here to have the tokens up to ``end`` without a copy: load back what the host has, and compute the rest, alone. 0 where
    nothing was measured yet."""
    if stats is None:
        return 0.0
    begin = found.tokens
    missing = max(0, end - begin)
    squares = end**2 - begin**2 if missing else 0
    return (
        found.host_tokens * stats.load_back_ms_per_token
        + missing * stats.prefill_ms_per_token
        + squares * stats.prefill_ms_per_token2
    )


def is_worth(found: Found, end: int, copy_ms_per_token: float, stats: Stats | None) -> bool:
    """Whether to copy the tokens up to ``end`` is quicker than to do without. Where nothing was measured, whoever named the source is
    believed."""
    if end <= found.tokens:
        return False
    alone_ms = computing_ms(found, end, stats)
    return alone_ms == 0.0 or BEGIN_MS + (end - found.device_tokens) * copy_ms_per_token < alone_ms


def patience_s(found: Found, end: int, stats: Stats | None) -> float:
    """How long a request may wait for its copy: as long as it would take to do without it. What has come by then stays."""
    return max(LEAST_PATIENCE_MS, computing_ms(found, end, stats)) / 1e3
