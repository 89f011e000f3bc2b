"""Who takes over which prefixes of a worker that leaves. Pure.

The hottest are given first, each to the worker that is the least busy once what it was given is counted in: with the prefixes comes their
traffic. What another worker holds anyway stays there, and what fits nobody is left to be computed again by whoever is asked.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefixmesh.router.endpoint import Endpoint


class Leaving(NamedTuple):
    """A prefix at the worker that leaves, by its number among those that it named."""

    number: int
    tokens: int
    holders: Collection[Endpoint]
    """Others that hold all of it."""

    adapter_digest: str = ""


@dataclass(slots=True, kw_only=True)
class Taker:
    """A worker that may take some over."""

    endpoint: Endpoint
    work_ms: float
    """That it has accepted and not done."""

    room_tokens: float
    """Free on its device, or cached there and not in use."""

    ms_per_token: float
    """Of its prefill: what a token of a prefix stands for in work to come."""

    adapters: Collection[str] = ()
    """Digests of those that it knows."""


class Given(NamedTuple):
    """A prefix, by its number, and who takes it over."""

    number: int
    endpoint: Endpoint


def share_out(prefixes: Sequence[Leaving], takers: Sequence[Taker]) -> list[Given]:
    """Who takes what, in the order of ``prefixes``, the hottest first. O(prefixes * takers)."""
    names = {taker.endpoint for taker in takers}
    room = {taker.endpoint: taker.room_tokens for taker in takers}
    busy = {taker.endpoint: taker.work_ms for taker in takers}
    given = []
    for prefix in prefixes:
        if names.intersection(prefix.holders):
            continue
        able = [
            taker
            for taker in takers
            if room[taker.endpoint] >= prefix.tokens
            and (not prefix.adapter_digest or prefix.adapter_digest in taker.adapters)
        ]
        if not able:
            continue
        taker = min(
            able, key=lambda one: (busy[one.endpoint] + prefix.tokens * one.ms_per_token, one.endpoint)
        )
        room[taker.endpoint] -= prefix.tokens
        busy[taker.endpoint] += prefix.tokens * taker.ms_per_token
        given.append(Given(prefix.number, taker.endpoint))
    return given
