"""What workers are expected to hold soon: the blocks of requests that were sent to them and have not ended.

A decision that left no trace until the worker told of the new blocks would scatter a burst with one new prefix over the whole fleet.
So each decision leaves a prediction, which lives as long as its reservation, and a walk of the index counts it. It never enters the
index: what a worker has told stays comparable with what it says of itself.
"""

from collections.abc import Mapping, Sequence

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint


class Prediction:
    """The blocks of one request at one worker; made by ``Predictions.expect``, ended once by ``Predictions.end``."""

    __slots__ = ("fingerprints", "has_ended", "slot")

    def __init__(self, slot: int, fingerprints: Sequence[Fingerprint]) -> None:
        self.slot = slot
        self.fingerprints = fingerprints
        self.has_ended = False


class Predictions:
    """Expected blocks by name, with the slots that will have them. Not thread-safe."""

    __slots__ = ("_counts", "_masks", "_open")

    def __init__(self) -> None:
        self._masks: dict[Fingerprint, int] = {}
        # How many requests expect a block at a slot, where it is more than one.
        self._counts: dict[tuple[Fingerprint, int], int] = {}
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
        counts: dict[tuple[Fingerprint, int], int] = {}
        for slot, some in self._open.items():
            for prediction in some:
                for name in prediction.fingerprints:
                    counts[name, slot] = counts.get((name, slot), 0) + 1
        masks: dict[Fingerprint, int] = {}
        for name, slot in counts:
            masks[name] = masks.get(name, 0) | 1 << slot
        if masks != self._masks or {key: n for key, n in counts.items() if n > 1} != self._counts:
            raise InvariantError(f"{self!r}: what is expected is not what the open requests expect")

    def _add(self, slot: int, fingerprints: Sequence[Fingerprint]) -> None:
        masks, counts, bit = self._masks, self._counts, 1 << slot
        for place, name in enumerate(fingerprints):
            mask = masks.get(name)
            if mask is None:
                # Whole prefixes are expected: behind the first block that nobody expects there is none.
                masks.update(dict.fromkeys(fingerprints[place:], bit))
                return
            if mask & bit:
                counts[name, slot] = counts.get((name, slot), 1) + 1
            else:
                masks[name] = mask | bit

    def _drop(self, slot: int, fingerprints: Sequence[Fingerprint]) -> None:
        masks, counts, bit = self._masks, self._counts, 1 << slot
        for name in fingerprints:
            if counts and (count := counts.get((name, slot))) is not None:
                if count == 2:
                    del counts[name, slot]
                else:
                    counts[name, slot] = count - 1
            elif (mask := masks[name]) == bit:
                del masks[name]
            else:
                masks[name] = mask & ~bit

    def __repr__(self) -> str:
        return f"<Predictions {len(self)} of {len(self._masks)} blocks at {len(self._open)} slots>"
