"""A worker's cache in a replay: which blocks are on the device and on the host, each the least recently used first to go. Pure.

Three kinds, as workers have them: a tree that shares every block of the workload (``radix``), a table of fixed blocks of 16 tokens that
shares whole ones only (``hash``), and none (``off``). A block is a name. No tree is needed for the first either: whoever uses a prompt
uses all its blocks, and the first of them last, so a block is never older than those that go on from it, and what goes for want of room
is always an end (a leaf). The host has a copy of all that comes to the device (write-through) and keeps it for longer if it has more
room; copies take no time here.

What requests use while they run takes room too: blocks that they have found or left are *locked* and do not go, and those that only they
have, of prompts under way and of answers, are *private*::

    total = free + kept (old ones go when room is wanted) + locked + private

What is pinned is locked by nobody, and so for ever. This is not the cache that serves (``cache.radix_cache``): it has no payers or copies in flight, and a block that two requests have
computed side by side is there once as soon as both have left it.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

from prefixmesh.cache.events import TierState
from prefixmesh.cache.hash_cache import HASH_BLOCK_SIZE
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint

CacheKind = Literal["radix", "hash", "off"]
CACHE_KINDS: Final[tuple[CacheKind, ...]] = ("radix", "hash", "off")


class Held(NamedTuple):
    """How many leading blocks of a prompt are there."""

    device: int
    total: int
    """On the device or, from there on, on the host."""


class Change(NamedTuple):
    """What a use has changed on a tier."""

    tier: Tier
    parent: Fingerprint | None
    """The block before the first that came; None when that begins a prompt."""

    came: Sequence[Fingerprint]
    """A chain."""

    went: Sequence[Fingerprint]


def unit_blocks(kind: CacheKind, block_size: int) -> int:
    """Blocks of a workload that a cache of this kind shares only together: those that its own block spans, where that is larger."""
    return max(1, HASH_BLOCK_SIZE // block_size) if kind == "hash" else 1


class BlockCache:
    """Names on two tiers. ``total_blocks`` are those of the device. Of each prompt every ``told_every``-th block is told of and counts in
    ``state``: what stands for all before it, where routers know larger blocks than the workload has. ``unit``: see ``unit_blocks``."""

    def __init__(
        self,
        total_blocks: int,
        host_blocks: int = 0,
        *,
        kind: CacheKind = "radix",
        unit: int = 1,
        told_every: int = 1,
    ) -> None:
        self.total_blocks = total_blocks
        self._keeps = kind != "off"
        self._unit = unit
        self._kept: OrderedDict[Fingerprint, None] = OrderedDict()
        # Who uses it: how often a block is locked. None is in ``_kept`` as well.
        self._locks: dict[Fingerprint, int] = {}
        self._private = 0
        self._told = _Told(Tier.DEVICE, told_every)
        self._host = _HostLine(host_blocks if self._keeps else 0, told_every)

    def __len__(self) -> int:
        """Blocks on the device that are shared or can be."""
        return len(self._kept) + len(self._locks)

    @property
    def used_blocks(self) -> int:
        """Of the device, those of requests that run, and pinned ones."""
        return len(self._locks) + self._private

    @property
    def free_blocks(self) -> int:
        """Of the device, those with nothing in them."""
        return self.total_blocks - len(self._kept) - len(self._locks) - self._private

    def held(self, names: Sequence[Fingerprint], coming: Collection[Fingerprint] = ()) -> Held:
        """What is there of a prompt, ``coming`` blocks counted as if they were on the device. Changes nothing. O(held blocks)."""
        if not self._keeps:
            return Held(0, 0)
        kept, locks, host = self._kept, self._locks, self._host.names
        count = 0
        for name in names:
            if name not in kept and name not in locks and name not in coming:
                break
            count += 1
        on_device = count
        if host:
            for name in names[count:]:
                if name not in host and name not in kept and name not in locks and name not in coming:
                    break
                count += 1
        unit = self._unit
        return Held(on_device - on_device % unit, count - count % unit)

    def use(self, names: Sequence[Fingerprint]) -> list[Change]:
        """All blocks of a prompt are used now, by nobody who runs: those that are not there come, and the oldest go for them. For caches in
        which nothing is locked. O(names)."""
        names = self.whole(names)
        changes = self._host.use(names)
        kept, names = self._kept, names[: self.total_blocks]
        known = self._known(names)
        kept.update(dict.fromkeys(reversed(names[known:])))
        for name in reversed(names[:known]):
            kept.move_to_end(name)
        went = [kept.popitem(last=False)[0] for _ in range(-self.free_blocks)]
        if known < len(names):
            changes.append(self._told.change(names, known, went))
        return changes

    def pin(self, names: Sequence[Fingerprint]) -> list[Change]:
        """Blocks of a chain are there from now on and never go; the oldest go for them. O(names)."""
        names = self.whole(names)
        changes = self._host.use(names)
        known = self._known(names)
        self._lock(names)
        went = [self._kept.popitem(last=False)[0] for _ in range(-self.free_blocks)]
        if known < len(names):
            changes.append(self._told.change(names, known, went))
        return changes

    # What runs.

    def begin(self, held: Sequence[Fingerprint], private_blocks: int) -> list[Change] | None:
        """A request begins: ``held`` is locked, and so many blocks of its own come beside it, for which the oldest go. None, and nothing is
        changed, where there is no room. O(held + gone blocks)."""
        locks = self._locks
        fresh = sum(name not in locks for name in held)
        if len(locks) + fresh + self._private + private_blocks > self.total_blocks:
            return None
        self._lock(held)
        self._private += private_blocks
        went = [self._kept.popitem(last=False)[0] for _ in range(-self.free_blocks)]
        return [self._told.change((), 0, went)] if went else []

    def leave(self, names: Sequence[Fingerprint], locked: int) -> tuple[int, list[Change]]:
        """A running request has computed a chain, the first ``locked`` of which it has locked: what was its own of the rest is there for
        all, and locked by it. How many of the chain it has locked now, and what that changed. O(names)."""
        names = self.whole(names)
        rest = names[locked:]
        if not rest:
            return locked, []
        changes = self._host.use(names)
        known = self._known(names)
        self._lock(rest)
        self._private -= len(rest)
        if known < len(names):
            changes.append(self._told.change(names, known, ()))
        return len(names), changes

    def end(self, locked: Sequence[Fingerprint], private_blocks: int) -> None:
        """A request has ended: what it had locked may go from now on, its end first, and what was its own is free. O(locked)."""
        locks, kept = self._locks, self._kept
        for name in reversed(locked):
            count = locks[name] - 1
            if count:
                locks[name] = count
            else:
                del locks[name]
                kept[name] = None
        self._private -= private_blocks

    def whole(self, names: Sequence[Fingerprint]) -> Sequence[Fingerprint]:
        """What of a chain a cache of this kind keeps for others: all, what fills its own blocks, or nothing. O(1) or O(names)."""
        if not self._keeps:
            return ()
        rest = len(names) % self._unit
        return names[: len(names) - rest] if rest else names

    def state(self, tier: Tier) -> TierState:
        """Count and XOR of the names on a tier that are told of. O(1)."""
        return (self._host.told if tier is Tier.HOST else self._told).state()

    def names(self) -> Sequence[Fingerprint]:
        """All that is on the device. O(blocks)."""
        return [*self._kept, *self._locks]

    def _known(self, names: Sequence[Fingerprint]) -> int:
        kept, locks = self._kept, self._locks
        for count, name in enumerate(names):
            if name not in kept and name not in locks:
                return count
        return len(names)

    def _lock(self, names: Sequence[Fingerprint]) -> None:
        locks, kept = self._locks, self._kept
        for name in names:
            count = locks.get(name, 0)
            if not count:
                kept.pop(name, None)
            locks[name] = count + 1


class _HostLine:
    """The host, in the order of use; without room it has nothing and tells nothing."""

    def __init__(self, room: int, told_every: int) -> None:
        self.names: OrderedDict[Fingerprint, None] = OrderedDict()
        self.told = _Told(Tier.HOST, told_every)
        self._room = room

    def use(self, names: Sequence[Fingerprint]) -> list[Change]:
        if not self._room:
            return []
        line, names = self.names, names[: self._room]
        known = next((count for count, name in enumerate(names) if name not in line), len(names))
        line.update(dict.fromkeys(reversed(names[known:])))
        for name in reversed(names[:known]):
            line.move_to_end(name)
        went = [line.popitem(last=False)[0] for _ in range(len(line) - self._room)]
        return [self.told.change(names, known, went)] if known < len(names) else []


class _Told:
    """What a tier tells of itself: every so manieth block of a chain, and what proves that all of it was heard."""

    def __init__(self, tier: Tier, every: int) -> None:
        self._tier = tier
        self._every = every
        self._there: set[Fingerprint] = set()
        self._count = 0
        self._digest = 0

    def state(self) -> TierState:
        return TierState(self._count, self._digest)

    def change(self, names: Sequence[Fingerprint], known: int, went: Sequence[Fingerprint]) -> Change:
        """Of a chain all but the first ``known`` came, and others went."""
        every = self._every
        first = known + every - 1 - known % every
        came = names[first::every]
        if every > 1:
            there = self._there
            there.update(came)
            went = [name for name in went if name in there]
            there.difference_update(went)
        digest = self._digest
        for name in came:
            digest ^= name
        for name in went:
            digest ^= name
        self._digest = digest
        self._count += len(came) - len(went)
        return Change(self._tier, names[first - every] if first >= every and came else None, came, went)
