"""Predictions that outlive their requests: what a worker is believed to hold until it has told, or, of a worker that never tells, for a while.

A request that has ended has left its blocks in the worker's cache, and the worker's events will say so a moment later. Between the two
the next turn of the same conversation may arrive: without its prediction it would be sent elsewhere. So the prediction stays until a
report has named the request as ended (its events come before such a report), or, where none does, for ``LINGER_S``.

A worker whose cache tells nothing (``hash``) is known by this alone. What was sent there is believed for ``BELIEF_S``, up to
``BELIEF_BLOCKS`` blocks, the oldest leave first, and a request that finds less than was believed takes everything back that goes on
from there.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from prefixmesh.ids import Fingerprint
from prefixmesh.router.predictions import Prediction, Predictions

LINGER_S: Final = 3.0
"""Some thirty reports at the usual interval: a worker that has not told by then has evicted the blocks, or never had them."""

BELIEF_S: Final = 300.0
"""How long a cache that tells nothing is believed to keep what it has computed."""

BELIEF_BLOCKS: Final = 16_384
"""A million tokens of 64 a block, some 2 MB here. What such a cache really holds, nobody knows."""


class Lingering:
    """What ended requests have left at one worker, oldest first. Not thread-safe.

    A prediction may also be ended by others (the worker's life is over): that is no error, and it is dropped in its time.
    """

    __slots__ = ("_blocks", "_by_request", "_kept", "_predictions", "tells")

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        # Due times grow from left to right, but for a change of ``tells``, which only makes some stay longer than they must.
        self._kept: deque[tuple[float, str, Prediction]] = deque()
        self._by_request: dict[str, list[Prediction]] = {}
        self._blocks = 0
        self.tells = True
        """Whether the worker tells of its blocks."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, predictions: Iterable[Prediction], now: float) -> None:
        """Let these predictions of an ended request stay for a while. O(predictions), and O(blocks) of those that must go for them."""
        until = now + (LINGER_S if self.tells else BELIEF_S)
        for prediction in predictions:
            self._kept.append((until, request_id, prediction))
            self._by_request.setdefault(request_id, []).append(prediction)
            self._blocks += len(prediction.fingerprints)
        while self._blocks > BELIEF_BLOCKS:
            self._drop_oldest()

    def told(self, request_ids: Collection[str]) -> None:
        """The worker has said that these have ended, and before that what they left. O(ids + their blocks)."""
        if not self.tells:
            return
        for request_id in request_ids:
            for prediction in self._by_request.get(request_id, ()):
                self._predictions.end(prediction)

    def expire(self, now: float) -> None:
        """End what has stayed long enough. O(1) for each."""
        while self._kept and self._kept[0][0] <= now:
            self._drop_oldest()

    def take_back(self, fingerprints: Sequence[Fingerprint], keep: int) -> None:
        """A request found only ``keep`` leading blocks of its prompt: what goes on from there is not believed any more. O(len)."""
        if self.tells or keep >= len(fingerprints):
            return
        missing = fingerprints[keep]
        for _, _, prediction in self._kept:
            names = prediction.fingerprints
            if len(names) > keep and names[keep] == missing:
                self._predictions.end(prediction)

    def clear(self) -> None:
        """End all. O(their blocks)."""
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, request_id, prediction = self._kept.popleft()
        self._predictions.end(prediction)
        self._blocks -= len(prediction.fingerprints)
        of_request = self._by_request[request_id]
        of_request.remove(prediction)
        if not of_request:
            del self._by_request[request_id]
