"""Which workers hold which blocks, as they have told it: one index for the whole fleet, at once a prefix tree per worker.

A block is named by its fingerprint. Names are chained, so each stands for the whole prefix that ends there, and the tree needs no
links: a walk looks up names from the first on, and stops where nobody is left that holds them all. What is kept of a block is one
number, which names its set of holders (``holder_sets``); a number is no object, so a million blocks are nothing to the garbage
collector.

A cache holds no block without all that come before it. So where a walk finds the same set of holders a few blocks further on, it is the
set of those between, and they need no looking up: a name is three places in memory, and that many waits for it.

What is only expected, because a request is on its way that will compute it, is no holding and is kept apart (``predictions``); a walk
counts it as if it were on the device.

Holders are *slots*: small numbers that the caller gives to whom it likes. A worker whose snapshot is being loaded has two, the one
that is matched and the one that is filled, and when the snapshot is complete the caller changes over: nothing half loaded ever shows.

The index is bounded. Beyond the bound blocks go in the order in which they came, but for those that a prompt has asked for since
(second chance: Corbató, "A paging experiment with the Multics system", 1968). What went counts for nobody any more; what it was told
of a block that it does not know is no error.
"""

import heapq
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Final, NamedTuple

from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.holder_sets import NOBODY, HolderSets

SHARD_BITS: Final = 10
SHARD_SHIFT: Final = 64 - SHARD_BITS
"""Blocks lie in 1,024 tables by the high bits of their names: one table of a million would move them all whenever it grows."""

MAX_TOUCHED: Final = 65_536
"""Blocks that are remembered to have been asked for: a thousand prompts of 4,096 tokens. Then it begins anew."""

SWEEP_BLOCKS: Final = 256
"""Blocks looked at in one go of making room: a tenth of a millisecond."""

SWEEP_PER_BLOCK: Final = 2
"""Blocks looked at for each that comes, while some are dead: a leaver's are gone before as many have come as half of all there are."""

STRETCH: Final = 8
"""Blocks of which a walk looks up the last one first. So many look-ups in all as blocks over this, and this for each change of holders:
about the least for a prompt of 64 blocks, which has a few changes, and near it for ten times as many."""

NAMES_PER_BLOCK: Final = 2
"""The order of coming may hold so many times the blocks that are there before it is tidied: blocks go, and their names stay."""

_NEW: Final = -1
"""What a table says of a name that it does not have."""


NOTHING_PREDICTED: Final[Mapping[Fingerprint, int]] = MappingProxyType({})


class Fall(NamedTuple):
    """Slots whose match ends at the same place."""

    slots: int
    """A bit for each."""

    blocks: int
    """How many leading blocks they hold."""


class Matches(NamedTuple):
    """What is held of a prompt, by slot. Slots that hold nothing are in none of the falls."""

    device: list[Fall]
    """Leading blocks on the device."""

    total: list[Fall]
    """Leading blocks on either tier. What a slot holds here beyond its device match is to be loaded back."""


class BlockIndex:
    """Blocks by fingerprint, with the set of slots that hold each. Not thread-safe: one loop owns it.

    Told: ``open_slot``, ``stored``, ``removed``, ``close_slot``. Asked: ``find_matches``, ``touch``, ``len``. Kept small: ``sweep``.
    """

    def __init__(self, max_blocks: int) -> None:
        assert max_blocks > 0, max_blocks
        self._max_blocks = max_blocks
        # A name stays in its table, with NOBODY, until the order of coming has passed it: so it is in that once.
        self._shards: list[dict[Fingerprint, int]] = [{} for _ in range(1 << SHARD_BITS)]
        self._sets = HolderSets()
        self._slots: set[int] = set()
        # Those below the highest that was ever open which are not: a heap.
        self._closed: list[int] = []
        self._count = 0
        # The order in which names came, from _oldest on.
        self._order = array("Q")
        self._oldest = 0
        # What was asked for, and what was asked for since that was put together last.
        self._touched: dict[Fingerprint, None] = {}
        self._asked: list[Sequence[Fingerprint]] = []
        self._asked_blocks = 0
        self.dropped = 0
        """Blocks that went for want of room."""

    def __len__(self) -> int:
        """Blocks that are kept, those among them that lost their last holder and were not swept yet."""
        return self._count

    @property
    def needs_sweep(self) -> bool:
        """Whether ``sweep`` has anything to do. O(1)."""
        return (
            self._sets.dead_blocks > 0
            or self._count > self._max_blocks
            or len(self._order) - self._oldest > NAMES_PER_BLOCK * self._count + SWEEP_BLOCKS
        )

    def open_slot(self) -> int:
        """A slot that holds nothing: the lowest that is free, so that masks stay short. O(log slots)."""
        slot = heapq.heappop(self._closed) if self._closed else len(self._slots)
        self._slots.add(slot)
        return slot

    def close_slot(self, slot: int) -> None:
        """Forget what a slot holds, at once, and the slot. O(different sets of holders), whatever it held.

        Blocks that nobody else holds are not found any more from now on; ``sweep`` takes them away.
        """
        self._slots.remove(slot)
        heapq.heappush(self._closed, slot)
        self._sets.clear_slot(slot)

    def stored(self, slot: int, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        """A slot holds these blocks on the tier from now on. O(fingerprints). Makes room as it goes, a little at a time."""
        self._count += self._change(fingerprints, slot, tier)
        if self.needs_sweep:
            over = self._count - self._max_blocks
            share = min(SWEEP_BLOCKS, SWEEP_PER_BLOCK * len(fingerprints))
            self.sweep(over + SWEEP_BLOCKS if over > 0 else share)

    def removed(self, slot: int, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        """A slot holds these blocks on the tier no longer. Not known, or not held: nothing happens. O(fingerprints)."""
        shards, sets = self._shards, self._sets
        last = after = NOBODY
        run = 0
        for name in fingerprints:
            shard = shards[name >> SHARD_SHIFT]
            before = shard.get(name, NOBODY)
            if before != last:
                self._count -= 0 if after else run
                sets.move(last, after, run)
                last, run = before, 0
                after = sets.without_holder(before, slot, tier) if before else NOBODY
            if before:
                shard[name] = after
                run += 1
        self._count -= 0 if after else run
        sets.move(last, after, run)

    def find_matches(
        self, fingerprints: Sequence[Fingerprint], predicted: Mapping[Fingerprint, int] = NOTHING_PREDICTED
    ) -> Matches:
        """How many leading blocks every slot holds, or is ``predicted`` to hold: slots' bits by name, always a prompt's first blocks.

        Changes nothing. O(blocks walked / STRETCH), and up to O(STRETCH) for every fall.
        """
        if not fingerprints:
            return Matches([], [])
        shards, device_of, host_of = self._shards, self._sets.device, self._sets.host
        first = fingerprints[0]
        if first not in predicted:
            predicted = NOTHING_PREDICTED
            if not shards[first >> SHARD_SHIFT].get(first, NOBODY):
                return Matches([], [])
        device, total = _Walk(), _Walk()
        last, last_expected = -1, 0
        for start in range(0, len(fingerprints), STRETCH):
            stretch = fingerprints[start : start + STRETCH]
            name = stretch[-1]
            end, end_expected = shards[name >> SHARD_SHIFT].get(name, NOBODY), predicted.get(name, 0)
            if end == last and end_expected == last_expected:
                continue
            for depth, name in enumerate(stretch, start):
                number = shards[name >> SHARD_SHIFT].get(name, NOBODY)
                expected = predicted.get(name, 0)
                if number == last and expected == last_expected:
                    continue
                last, last_expected = number, expected
                on_device = device_of[number] | expected
                device.narrow(on_device, depth)
                if not total.narrow(on_device | host_of[number], depth):
                    return Matches(device.falls, total.falls)
                if number == end and expected == end_expected:
                    break  # and so has the rest of the stretch
        device.narrow(0, len(fingerprints))
        total.narrow(0, len(fingerprints))
        return Matches(device.falls, total.falls)

    def leading_blocks(self, slot: int, tier: Tier, fingerprints: Sequence[Fingerprint]) -> int:
        """How many leading blocks a slot holds on one tier. Changes nothing. O(blocks)."""
        shards, masks = self._shards, self._sets.host if tier else self._sets.device
        for depth, name in enumerate(fingerprints):
            if not masks[shards[name >> SHARD_SHIFT].get(name, NOBODY)] >> slot & 1:
                return depth
        return len(fingerprints)

    def touch(self, fingerprints: Sequence[Fingerprint]) -> None:
        """A prompt has asked for these blocks, which must not change any more: they stay longer. O(1); the next sweep that is over the bound
        puts together what was asked for."""
        if not fingerprints:
            return  # shorter than a block: it counts for nothing, and would never be forgotten
        if self._asked_blocks > MAX_TOUCHED:
            self._touched, self._asked, self._asked_blocks = {}, [], 0
        self._asked.append(fingerprints)
        self._asked_blocks += len(fingerprints)

    def sweep(self, at_most: int = SWEEP_BLOCKS) -> bool:
        """Look at the blocks that came first: drop what nobody holds, and, over the bound, what nobody asked for. O(at_most).

        True when there is nothing more to do. Call it when there is time; ``stored`` does as much as it must.
        """
        names = self._order[self._oldest : self._oldest + at_most]
        shards, sets = self._shards, self._sets
        stay = array("Q")
        if self._asked and self._count > self._max_blocks:
            self._touched.update(dict.fromkeys(chain.from_iterable(self._asked)))
            self._asked = []
        looked_at = len(names)
        for place, fingerprint in enumerate(names):
            name = Fingerprint(fingerprint)
            shard = shards[name >> SHARD_SHIFT]
            number = shard.get(name, NOBODY)
            if not number:
                del shard[name]
                continue
            is_dead = not (sets.device[number] or sets.host[number])
            is_over = self._count > self._max_blocks
            if is_dead or (is_over and name not in self._touched):
                del shard[name]
                sets.move(number, NOBODY, 1)
                self._count -= 1
                self.dropped += not is_dead
            elif is_over or self.needs_sweep:
                if is_over:
                    self._touched.pop(name, None)  # the chance is used
                stay.append(name)
            else:
                looked_at = place  # nothing left to do: what came first stays first
                break
        self._oldest += looked_at
        self._order.extend(stay)
        if self._oldest > len(self._order) // 2:
            del self._order[: self._oldest]
            self._oldest = 0
        return not self.needs_sweep

    def held(self, slot: int, tier: Tier) -> set[Fingerprint]:
        """What a slot holds. For checks: O(blocks)."""
        masks = self._sets.host if tier else self._sets.device
        return {name for shard in self._shards for name, number in shard.items() if masks[number] >> slot & 1}

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError with the state. O(blocks)."""
        self._sets.check_invariants()
        counted: dict[int, int] = {}
        for index, shard in enumerate(self._shards):
            for name, number in shard.items():
                counted[number] = counted.get(number, 0) + 1
                if name >> SHARD_SHIFT != index:
                    raise InvariantError(f"{self!r}: {name:016x} lies in shard {index}")
        coming = list(islice(self._order, self._oldest, None))
        if sorted(coming) != sorted(name for shard in self._shards for name in shard):
            raise InvariantError(f"{self!r}: the order of coming is not that of the names, each once")
        counted.pop(NOBODY, None)
        in_sets = {number: blocks for number, blocks in enumerate(self._sets.blocks) if blocks}
        if counted != in_sets or sum(counted.values()) != self._count:
            raise InvariantError(f"{self!r}: {counted} blocks lie in sets, {in_sets} are counted")
        slots = sum(1 << slot for slot in self._slots)
        if any((a | b) & ~slots for a, b in zip(self._sets.device, self._sets.host, strict=True)):
            raise InvariantError(f"{self!r}: a set has a holder that is no slot")
        if sorted([*self._slots, *self._closed]) != list(range(len(self._slots) + len(self._closed))):
            raise InvariantError(f"{self!r}: {self._closed} are not the slots below that are closed")

    def _change(self, fingerprints: Sequence[Fingerprint], slot: int, tier: Tier) -> int:
        """Add a holder to blocks; how many of them are new. Neighbours mostly have one set, so sets are counted by runs of them."""
        shards, sets = self._shards, self._sets
        last = after = NOBODY
        run = new = 0
        begun = False
        for name in fingerprints:
            shard = shards[name >> SHARD_SHIFT]
            before = shard.get(name, _NEW)
            if before == _NEW:
                self._order.append(name)
                before = NOBODY
            if before != last or not begun:
                sets.move(last, after, run)
                begun, last, run = True, before, 0
                after = sets.with_holder(before, slot, tier)
            shard[name] = after
            run += 1
            new += before == NOBODY
        sets.move(last, after, run)
        return new

    def __repr__(self) -> str:
        return (
            f"<BlockIndex {self._count} of at most {self._max_blocks} blocks in {len(self._sets)} sets of holders, "
            f"{len(self._slots)} slots, {self.dropped} dropped>"
        )


class _Walk:
    """Who is left of everybody, as a walk goes down a prompt on one tier."""

    __slots__ = ("falls", "left")

    def __init__(self) -> None:
        self.left = -1
        self.falls: list[Fall] = []

    def narrow(self, holders: int, depth: int) -> int:
        """Go on with those who are among ``holders`` of the block at ``depth``; who that is."""
        left = self.left & holders
        if left != self.left:
            if depth:
                self.falls.append(Fall(self.left & ~holders, depth))
            self.left = left
        return left
