"""Who holds: the different sets of holders there are, each kept once and named by a small number.

Most blocks are held by the same few sets of workers: all blocks of one conversation by one worker, those of a system prompt by all. So
an index keeps one number per block, and what the numbers mean is here: two bit masks, one a tier, with a bit for every slot (see
``block_index``). Adding a worker to a block is then a step from one number to another, which is remembered, and forgetting a worker is
forgetting its bit in every set, however many blocks those sets stand for.

Number 0 is the empty set. A set is freed when the last block leaves it. After a bit was cleared, several numbers may mean equal sets,
until their blocks have gone: at most one of them is given to new blocks.
"""

from typing import Final

from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError

NOBODY: Final = 0
"""The number of the empty set."""

Masks = tuple[int, int]
"""Holders on the device and on the host; bit ``n`` is slot ``n``."""

_SLOT_SHIFT: Final = 16
"""A step's name is its set's number above, and slot, tier and direction in so many bits below."""

_RETIRED: Final = 1024
"""Freed numbers rest until there are so many: giving one out again makes every remembered step wrong that leads to it."""


class HolderSets:
    """Sets of holders by number, with the count of blocks in each. Not thread-safe."""

    __slots__ = ("_free", "_numbers", "_retired", "_steps", "blocks", "dead_blocks", "device", "host")

    def __init__(self) -> None:
        self.device: list[int] = [0]
        """By number: a bit for every slot that holds on the device. To be read only."""

        self.host: list[int] = [0]
        """By number: the same for the host tier."""

        self.blocks: list[int] = [0]
        """By number: how many blocks have this set. The empty set counts none."""

        self.dead_blocks = 0
        """How many blocks have lost their last holder and were not moved out yet."""

        self._numbers: dict[Masks, int] = {(0, 0): NOBODY}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._steps: dict[int, int] = {}

    def __len__(self) -> int:
        """How many sets are in use, the empty one left out."""
        return len(self.device) - len(self._free) - len(self._retired) - 1

    def with_holder(self, number: int, slot: int, tier: Tier) -> int:
        """The number of this set with ``slot`` on the tier. O(1)."""
        return self._step(number, slot, tier, adds=True)

    def without_holder(self, number: int, slot: int, tier: Tier) -> int:
        """The number of this set without ``slot`` on the tier; maybe ``NOBODY``. O(1)."""
        return self._step(number, slot, tier, adds=False)

    def move(self, source: int, target: int, count: int) -> None:
        """Count ``count`` blocks out of one set and into another; ``NOBODY`` is where they come from and go to. O(1)."""
        if source == target:
            return
        if target:
            self.blocks[target] += count
        if source:
            if not (self.device[source] or self.host[source]):
                self.dead_blocks -= count
            self.blocks[source] -= count
            if not self.blocks[source]:
                self._release(source)

    def clear_slot(self, slot: int) -> None:
        """Take a slot out of every set. Sets of nobody else stay, with masks of 0, until their blocks are moved out. O(sets)."""
        bit, keep = 1 << slot, ~(1 << slot)
        device, host = self.device, self.host
        for number in range(1, len(device)):
            before = (device[number], host[number])
            if not (before[0] | before[1]) & bit:
                continue
            if self._numbers.get(before) == number:
                del self._numbers[before]
            after = (before[0] & keep, before[1] & keep)
            device[number], host[number] = after
            self._numbers.setdefault(after, number)
            if not any(after):
                self.dead_blocks += self.blocks[number]
        self._steps.clear()

    def check_invariants(self) -> None:
        """Recompute the numbers; raises InvariantError. O(sets)."""
        free = {*self._free, *self._retired}
        for masks, number in self._numbers.items():
            if number in free or masks != (self.device[number], self.host[number]):
                raise InvariantError(f"{self!r}: {masks} is not what number {number} means")
        dead = 0
        for number, blocks in enumerate(self.blocks):
            masks = (self.device[number], self.host[number])
            dead += 0 if any(masks) else blocks
            if number in free and (blocks or any(masks)):
                raise InvariantError(f"{self!r}: {number} is free and not empty")
            if blocks < 0 or (number not in free and number and not blocks):
                raise InvariantError(f"{self!r}: {number} is in use for {blocks} blocks")
        if dead != self.dead_blocks:
            raise InvariantError(f"{self!r}: {dead} blocks are dead, {self.dead_blocks} are counted")

    def _step(self, number: int, slot: int, tier: Tier, *, adds: bool) -> int:
        name = number << _SLOT_SHIFT | slot << 2 | tier << 1 | adds
        target = self._steps.get(name)
        if target is None or (target and not self.blocks[target]):  # not known, or freed meanwhile
            target = self._number_of(self._masks_after(number, slot, tier, adds=adds))
            self._steps[name] = target
        return target

    def _masks_after(self, number: int, slot: int, tier: Tier, *, adds: bool) -> Masks:
        masks = [self.device[number], self.host[number]]
        masks[tier] = masks[tier] | 1 << slot if adds else masks[tier] & ~(1 << slot)
        return masks[0], masks[1]

    def _number_of(self, masks: Masks) -> int:
        """The number for a set, a new one if need be. A caller moves blocks into it before anything else happens."""
        number = self._numbers.get(masks)
        if number is None:
            if not self._free and len(self._retired) >= _RETIRED:
                self._free, self._retired = self._retired, []
                self._steps.clear()
            if self._free:
                number = self._free.pop()
                self.device[number], self.host[number] = masks
            else:
                number = len(self.device)
                self.device.append(masks[0])
                self.host.append(masks[1])
                self.blocks.append(0)
            self._numbers[masks] = number
        return number

    def _release(self, number: int) -> None:
        masks = (self.device[number], self.host[number])
        if self._numbers.get(masks) == number:
            del self._numbers[masks]
        self.device[number] = self.host[number] = 0
        self._retired.append(number)

    def __repr__(self) -> str:
        return f"<HolderSets {len(self)} sets of {sum(self.blocks)} blocks, {len(self._steps)} steps known>"
