"""A worker's cache in a replay: which blocks are on the device and on the host, each the least recently used first to go. Pure.

A block is a name. No tree is needed: whoever uses a prompt uses all its blocks, and the first of them last, so a block is never older than
those that go on from it, and what goes for want of room is always an end. The host has a copy of all that comes to the device
(write-through) and keeps it for longer if it has more room; copies take no time here.

This is not the cache that serves (``cache.radix_cache``): it has whole blocks only, and no locks, pins, payers or copies in flight.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from prefixmesh.cache.events import TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint


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


class BlockCache:
    """Names on two tiers. ``total_blocks`` are those of the device."""

    def __init__(self, total_blocks: int, host_blocks: int = 0) -> None:
        self.total_blocks = total_blocks
        self._tiers = {Tier.DEVICE: _Line(total_blocks)}
        if host_blocks:
            self._tiers[Tier.HOST] = _Line(host_blocks)
        self._device = self._tiers[Tier.DEVICE].names
        self._host = self._tiers[Tier.HOST].names if host_blocks else OrderedDict[Fingerprint, None]()

    def __len__(self) -> int:
        """Blocks on the device."""
        return len(self._device)

    def held(self, names: Sequence[Fingerprint], coming: Collection[Fingerprint] = ()) -> Held:
        """What is there of a prompt, ``coming`` blocks counted as if they were on the device. Changes nothing. O(held blocks)."""
        device, host = self._device, self._host
        count = 0
        for name in names:
            if name not in device and name not in coming:
                break
            count += 1
        on_device = count
        if host:
            for name in names[count:]:
                if name not in host and name not in device and name not in coming:
                    break
                count += 1
        return Held(on_device, count)

    def use(self, names: Sequence[Fingerprint]) -> list[Change]:
        """All blocks of a prompt are used now: those that are not there come, and the oldest go for them. O(names)."""
        return [change for tier, line in self._tiers.items() if (change := line.use(tier, names))]

    def state(self, tier: Tier) -> TierState:
        """Count and XOR of the names on a tier. O(1)."""
        line = self._tiers.get(tier)
        return TierState(0, 0) if line is None else TierState(len(line.names), line.digest)

    def names(self) -> Sequence[Fingerprint]:
        """All that is on the device. O(blocks)."""
        return list(self._device)


class _Line:
    """One tier, in the order of use."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.names: OrderedDict[Fingerprint, None] = OrderedDict()
        self.digest = 0

    def use(self, tier: Tier, names: Sequence[Fingerprint]) -> Change | None:
        names = names[: self._room]
        known, line = 0, self.names
        for name in names:
            if name not in line:
                break
            known += 1
        came = names[known:]
        line.update(dict.fromkeys(reversed(came)))
        for name in reversed(names[:known]):
            line.move_to_end(name)
        went = [line.popitem(last=False)[0] for _ in range(len(line) - self._room)]
        if not came:
            return None
        for name in (*came, *went):
            self.digest ^= name
        return Change(tier, names[known - 1] if known else None, came, went)
