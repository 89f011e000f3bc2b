"""Predictions that outlive their requests: what a worker is believed to hold until it has told, or, of a worker that never tells, for a while.

A request that has ended has left its blocks in the worker's cache, and the worker's events will say so a moment later. Between the two
the next turn of the same conversation may arrive: without its prediction it would be sent elsewhere. So the prediction stays until a
report has named the request as ended (its events come before such a report), or, where none does, for ``LINGER_S``.

A worker whose cache tells nothing (``hash``) is known by this alone. What was sent there is believed for ``BELIEF_S``, up to
``BELIEF_BLOCKS`` blocks, the oldest leave first, and a request that finds less than was believed takes everything back that goes on
from there.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from prefixmesh.ids import Fingerprint
from prefixmesh.router.predictions import Prediction, Predictions

LINGER_S: Final = 3.0
"""Some thirty reports at the usual interval: a worker that has not told by then has evicted the blocks, or never had them."""

BELIEF_S: Final = 300.0
"""How long a cache that tells nothing is believed to keep what it has computed."""

BELIEF_BLOCKS: Final = 16_384
"""A million tokens of 64 a block, some 2 MB here. What such a cache really holds, nobody knows."""


class _Left(NamedTuple):
    """What one request has left."""

    until: float
    prompt: Prediction
    after: tuple[Prediction, ...]
    """Of each answer, the blocks that come after the prompt's."""

    @property
    def blocks(self) -> int:
        return sum(len(prediction.fingerprints) for prediction in (self.prompt, *self.after))


class Lingering:
    """What ended requests have left at one worker, oldest first. Not thread-safe.

    A prediction may also be ended by others (the worker's life is over): that is no error, and it is dropped in its time.
    """

    __slots__ = ("_blocks", "_left", "_predictions", "tells")

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        # By request, in the order of their ends.
        self._left: OrderedDict[str, _Left] = OrderedDict()
        self._blocks = 0
        self.tells = True
        """Whether the worker tells of its blocks."""

    def __len__(self) -> int:
        """Requests that have left something."""
        return len(self._left)

    def keep(self, request_id: str, prompt: Prediction, after: Iterable[Prediction], now: float) -> None:
        """Let stay for a while what an ended request has left: its prompt's blocks, and ``after`` them those of its answers. O(answers), and
        O(blocks) of those that must go for them."""
        self._drop(request_id)
        left = _Left(now + (LINGER_S if self.tells else BELIEF_S), prompt, tuple(after))
        self._left[request_id] = left
        self._blocks += left.blocks
        while self._blocks > BELIEF_BLOCKS:
            self._drop(next(iter(self._left)))

    def told(self, request_ids: Collection[str]) -> None:
        """The worker has said that these have ended, and before that what they left. O(ids + their blocks)."""
        if self.tells:
            for request_id in request_ids:
                self._drop(request_id)

    def expire(self, now: float) -> None:
        """End what has stayed long enough. O(1) for each."""
        while self._left:
            request_id, oldest = next(iter(self._left.items()))
            if oldest.until > now:
                return
            self._drop(request_id)

    def take_back(self, fingerprints: Sequence[Fingerprint], keep: int) -> None:
        """A request found only ``keep`` leading blocks of its prompt: what goes on from there is not believed any more. O(len)."""
        if self.tells or keep >= len(fingerprints):
            return
        missing = fingerprints[keep]
        for left in self._left.values():
            begins = len(left.prompt.fingerprints)
            is_in_prompt = _has_at(left.prompt, keep, missing)
            if is_in_prompt:
                self._predictions.end(left.prompt)
            for prediction in left.after:
                if is_in_prompt or _has_at(prediction, keep - begins, missing):
                    self._predictions.end(prediction)

    def clear(self) -> None:
        """End all. O(their blocks)."""
        for request_id in tuple(self._left):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        left = self._left.pop(request_id, None)
        if left is not None:
            self._blocks -= left.blocks
            for prediction in (left.prompt, *left.after):
                self._predictions.end(prediction)


def _has_at(prediction: Prediction, place: int, name: Fingerprint) -> bool:
    names = prediction.fingerprints
    return 0 <= place < len(names) and names[place] == name
