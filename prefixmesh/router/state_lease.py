"""Leases over a ``StateStore``: at most one of several routers does a thing, and another takes over when it stops.

A lease is an entry that names its owner and its end, and every step is a write that depends on the version read before, so any store
that can compare and set will do. Time is the store's own (``StateStore.now``), asked for before each step, so that the clocks of those who compete
do not matter. Whoever has missed a renewal must stop what the lease was for by its end, reckoned from before it was asked for.
"""

from typing import Final, NamedTuple

import msgspec

from prefixmesh.router.state_store import ABSENT, StateStore

LONGEST_S: Final = 60.0
"""No lease is asked for longer. One that seems to last longer was taken by another clock, in a store whose place this one has taken."""


class Lease(NamedTuple):
    """A lease that is held until ``expires_at``."""

    key: str
    owner: str
    expires_at: float
    version: int


class _Record(msgspec.Struct, frozen=True):
    owner: str
    expires_at: float


async def take_lease(store: StateStore, key: str, owner: str, ttl_s: float, now: float) -> Lease | None:
    """Hold ``key`` for ``ttl_s`` from ``now``; None while another owner does, or has just been quicker. One's own is renewed."""
    entry = await store.get(key)
    if entry is not None and _is_others(entry.value, owner, now):
        return None
    return await _write(store, key, owner, now + ttl_s, ABSENT if entry is None else entry.version)


async def renew_lease(store: StateStore, lease: Lease, ttl_s: float, now: float) -> Lease | None:
    """Hold it for ``ttl_s`` from ``now``; None when it was lost: it ran out and somebody else took it."""
    return await _write(store, lease.key, lease.owner, now + ttl_s, lease.version)


async def release_lease(store: StateStore, lease: Lease) -> bool:
    """Let others have it at once; False when it was lost already, and then theirs stays."""
    return await store.delete(lease.key, expect=lease.version)


def _is_others(value: bytes, owner: str, now: float) -> bool:
    """Whether another owner holds it. What no router can have written, or only by another clock, holds nothing."""
    try:
        record = msgspec.json.decode(value, type=_Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return record.owner != owner and now < record.expires_at <= now + LONGEST_S


async def _write(store: StateStore, key: str, owner: str, expires_at: float, expect: int) -> Lease | None:
    version = await store.put(key, msgspec.json.encode(_Record(owner, expires_at)), expect=expect)
    return None if version is None else Lease(key, owner, expires_at, version)
