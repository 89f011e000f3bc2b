"""The router's index beside a naive one: sets of names per slot and tier, and a walk written out.

What is held and expected is what caches can hold: no block without all that come before it, on either tier. What a router is told can
have holes all the same: news that were lost, a block that went for want of room. A walk may overlook a hole between the ends of a
stretch and nothing else: it never tells less than is held, and the block at which it says that a slot ends is really missing there.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.router.block_index import STRETCH, BlockIndex, Fall
from prefixmesh.router.predictions import Prediction, Predictions

# A trunk that forks, its names in shards of their own and in one; longer than a few stretches of the walk.
TRUNK = [Fingerprint(number << 54 | number % 3) for number in range(STRETCH + 3)]
FORKS = (
    [Fingerprint(7 << 54 | 100 + number) for number in range(2 * STRETCH)],
    [Fingerprint(900 + number << 54) for number in range(STRETCH + 1)],
)
paths = st.sampled_from([TRUNK + fork for fork in FORKS])
prompts = paths.flatmap(lambda path: st.integers(0, len(path)).map(lambda end: path[:end]))
tiers = st.sampled_from(list(Tier))


class BlockIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(max_blocks=1000)
        self.predictions = Predictions()
        self.held: dict[int, dict[Tier, set[Fingerprint]]] = {}
        self.holed: set[int] = set()
        self.expected: list[Prediction] = []

    @rule()
    def open_slot(self) -> None:
        slot = self.index.open_slot()
        assert slot not in self.held, "a slot is one holder's"
        self.held[slot] = {tier: set() for tier in Tier}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close_slot(self, data: st.DataObject) -> None:
        slot = self._draw_slot(data)
        self.index.close_slot(slot)
        self.predictions.end_all(slot)
        self.expected = [one for one in self.expected if one.slot != slot]
        del self.held[slot]
        self.holed.discard(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), names=prompts, tier=tiers)
    def stored(self, data: st.DataObject, names: list[Fingerprint], tier: Tier) -> None:
        slot = self._draw_slot(data)
        self.index.stored(slot, tier, names)
        self.held[slot][tier].update(names)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), path=paths, tier=tiers, whole=st.booleans())
    def removed(self, data: st.DataObject, path: list[Fingerprint], tier: Tier, whole: bool) -> None:
        """Everything behind some place of a path; with the trunk's end go both forks."""
        slot = self._draw_slot(data)
        start = data.draw(st.integers(0 if whole else len(TRUNK), len(path)))
        behind = [name for fork in FORKS for name in fork] if start < len(TRUNK) else []
        names = list(dict.fromkeys(path[start:] + behind))
        self.index.removed(slot, tier, names)
        self.held[slot][tier].difference_update(names)

    @precondition(lambda self: any(held[tier] for held in self.held.values() for tier in Tier))
    @rule(data=st.data())
    def lose_one(self, data: st.DataObject) -> None:
        """A block in the middle of what is held: what comes behind it stays."""
        holders = [(slot, tier) for slot, held in self.held.items() for tier in Tier if held[tier]]
        slot, tier = data.draw(st.sampled_from(holders))
        name = data.draw(st.sampled_from(sorted(self.held[slot][tier])))
        self.index.removed(slot, tier, [name])
        self.held[slot][tier].remove(name)
        self.holed.add(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), names=prompts)
    def expect(self, data: st.DataObject, names: list[Fingerprint]) -> None:
        self.expected.append(self.predictions.expect(self._draw_slot(data), names))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = self.expected.pop(data.draw(st.integers(0, len(self.expected) - 1)))
        self.predictions.end(one)
        self.predictions.end(one)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def change_over(self, data: st.DataObject) -> None:
        """A worker's snapshot is complete: it is the slot that was filled from now on."""
        slot, target = self._draw_slot(data), self.index.open_slot()
        self.held[target] = self.held.pop(slot)
        if slot in self.holed:
            self.holed.symmetric_difference_update({slot, target})
        for tier in Tier:
            self.index.stored(target, tier, sorted(self.held[target][tier]))
        self.predictions.move(slot, target)
        self.index.close_slot(slot)

    @rule(at_most=st.integers(1, 5))
    def sweep(self, at_most: int) -> None:
        self.index.sweep(at_most)

    @rule(names=prompts)
    def touch(self, names: list[Fingerprint]) -> None:
        self.index.touch(names)

    @rule(names=prompts)
    def find(self, names: list[Fingerprint]) -> None:
        matches = self.index.find_matches(names, self.predictions.masks)
        device, total = _by_slot(matches.device), _by_slot(matches.total)
        assert device.keys() | total.keys() <= self.held.keys()
        for slot, held in self.held.items():
            expected = self._expected_at(slot)
            on_device, anywhere = held[Tier.DEVICE] | expected, set.union(*held.values()) | expected
            if slot in self.holed:
                _check_holed(names, on_device, device.get(slot, 0))
                _check_holed(names, anywhere, total.get(slot, 0))
            else:
                assert device.get(slot, 0) == _leading(names, on_device)
                assert total.get(slot, 0) == _leading(names, anywhere)

    @invariant()
    def holds(self) -> None:
        self.index.check_invariants()
        self.predictions.check_invariants()
        for slot, held in self.held.items():
            for tier in Tier:
                assert self.index.held(slot, tier) == held[tier]

    def _draw_slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    def _expected_at(self, slot: int) -> set[Fingerprint]:
        return {name for one in self.expected if one.slot == slot for name in one.fingerprints}


def _leading(names: list[Fingerprint], held: set[Fingerprint]) -> int:
    return next((at for at, name in enumerate(names) if name not in held), len(names))


def _check_holed(names: list[Fingerprint], held: set[Fingerprint], found: int) -> None:
    assert found >= _leading(names, held)
    assert found == len(names) or names[found] not in held
    assert all(name in held for name in names[STRETCH - 1 : found : STRETCH]), "only a hole inside a stretch"


def _by_slot(falls: list[Fall]) -> dict[int, int]:
    found: dict[int, int] = {}
    for fall in falls:
        for slot in range(fall.slots.bit_length()):
            if fall.slots >> slot & 1:
                assert slot not in found, "a slot falls once"
                found[slot] = fall.blocks
    return found


TestBlockIndex: Any = BlockIndexMachine.TestCase
TestBlockIndex.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
