"""What workers are expected to hold soon: the blocks of requests that were sent to them and have not ended.

A decision that left no trace until the worker told of the new blocks would scatter a burst with one new prefix over the whole fleet.
So each decision leaves a prediction, which lives as long as its reservation, and a walk of the index counts it. It never enters the
index: what a worker has told stays comparable with what it says of itself.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint


class Prediction(msgspec.Struct, eq=False, gc=False):
    """The blocks of one request at one worker; made by ``Predictions.expect``, ended once by ``Predictions.end``."""

    slot: int
    fingerprints: Sequence[Fingerprint]
    has_ended: bool = False


class Predictions:
    """Expected blocks by name, with the slots that will have them. Not thread-safe."""

    __slots__ = ("_counts", "_masks", "_open")

    def __init__(self) -> None:
        self._masks: dict[Fingerprint, int] = {}
        # By slot: how many requests expect a block there, where it is more than one.
        self._counts: dict[int, dict[Fingerprint, int]] = {}
        # In the order in which they were made: what goes on from a prediction comes after it.
        self._open: dict[int, dict[Prediction, None]] = {}

    @property
    def masks(self) -> Mapping[Fingerprint, int]:
        """A bit for every slot that is expected to hold a block, by the block's name. To be read only."""
        return self._masks

    def __len__(self) -> int:
        """Predictions that have not ended."""
        return sum(map(len, self._open.values()))

    def expect(self, slot: int, fingerprints: Sequence[Fingerprint]) -> Prediction:
        """A request with these blocks goes to ``slot``: from the prompt's first on, or going on from those of another prediction there
        that ends no sooner. O(fingerprints)."""
        self._add(slot, fingerprints)
        prediction = Prediction(slot, fingerprints)
        self._open.setdefault(slot, {})[prediction] = None
        return prediction

    def end(self, prediction: Prediction) -> None:
        """The request has ended: what it computed the worker has told by now, or never will. Ended already: nothing. O(fingerprints)."""
        if prediction.has_ended:
            return
        prediction.has_ended = True
        slot = prediction.slot
        del self._open[slot][prediction]
        if not self._open[slot]:
            del self._open[slot]
        self._drop(slot, prediction.fingerprints)

    def end_all(self, slot: int) -> None:
        """The worker of a slot is gone, and with it all that was expected there. O(its blocks)."""
        for prediction in tuple(self._open.get(slot, ())):
            self.end(prediction)

    def move(self, slot: int, target: int) -> None:
        """A worker is another slot from now on, one at which nothing is expected yet. O(its blocks)."""
        assert target not in self._open, target
        moved = self._open.pop(slot, None)
        if moved is None:
            return
        for prediction in moved:
            prediction.slot = target
            self._drop(slot, prediction.fingerprints)
        for prediction in moved:
            self._add(target, prediction.fingerprints)
        self._open[target] = moved

    def check_invariants(self) -> None:
        """Recompute masks and counts from the open predictions; raises InvariantError. O(their blocks)."""
        masks: dict[Fingerprint, int] = {}
        more: dict[int, dict[Fingerprint, int]] = {}
        for slot, some in self._open.items():
            counts = Counter(name for prediction in some for name in prediction.fingerprints)
            for name in counts:
                masks[name] = masks.get(name, 0) | 1 << slot
            more[slot] = {name: count for name, count in counts.items() if count > 1}
        if masks != self._masks or {slot: counts for slot, counts in more.items() if counts} != self._counts:
            raise InvariantError(f"{self!r}: what is expected is not what the open requests expect")

    def _add(self, slot: int, fingerprints: Sequence[Fingerprint]) -> None:
        masks, bit = self._masks, 1 << slot
        counts = self._counts.setdefault(slot, {})
        for place, name in enumerate(fingerprints):
            mask = masks.get(name)
            if mask is None:
                # Whole prefixes are expected: behind the first block that nobody expects there is none.
                masks.update(dict.fromkeys(fingerprints[place:], bit))
                break
            if mask & bit:
                counts[name] = counts.get(name, 1) + 1
            else:
                masks[name] = mask | bit
        if not counts:
            del self._counts[slot]

    def _drop(self, slot: int, fingerprints: Sequence[Fingerprint]) -> None:
        masks, bit = self._masks, 1 << slot
        counts = self._counts.get(slot)
        for name in fingerprints:
            if counts and (count := counts.get(name)) is not None:
                if count == 2:
                    del counts[name]
                else:
                    counts[name] = count - 1
            elif (mask := masks[name]) == bit:
                del masks[name]
            else:
                masks[name] = mask & ~bit
        if counts is not None and not counts:
            del self._counts[slot]

    def __repr__(self) -> str:
        return f"<Predictions {len(self)} of {len(self._masks)} blocks at {len(self._open)} slots>"
