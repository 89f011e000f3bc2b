"""Where a step waits for KV that is on its way: what ``Mover.expect`` and ``await_layer`` share, whatever copies.

A mover's thread reports each layer of each load-back here, and how it ended; the loop that computes waits here for the layers its step
reads. A wait is bounded for the step as a whole, so that a slow copy costs a step a known time and no more.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from prefixmesh.errors import LoadBackError
from prefixmesh.worker.tiers.page_copies import Mark

CLOSED: Final = "the mover was closed"


class Arriving:
    """How far one load-back has come."""

    __slots__ = ("error", "marks", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.marks: list[Mark] = []
        """One for each layer that has come, or that the device can be made to wait for."""

        self.error = ""
        """Why no more will come; empty while all is well."""


class LayerGate:
    """Thread-safe: ``arrived`` and ``failed`` from the mover's thread, the rest from the loop that computes."""

    def __init__(self, join: Callable[[Mark], None], clock: Callable[[], float] = time.monotonic) -> None:
        """``join`` makes what is computed next come after a layer's bytes."""
        self._join = join
        self._clock = clock
        self._changed = threading.Condition()
        self._expected: tuple[Arriving, ...] = ()
        self._left_s = 0.0
        self._closed = False

    def expect(self, jobs: Sequence[Arriving], at_most_s: float) -> None:
        """The next step reads what these bring, and may wait ``at_most_s`` in all. Forgets what was expected before."""
        with self._changed:
            self._expected = tuple(jobs)
            self._left_s = at_most_s

    def await_layer(self, layer: int) -> None:
        """Block until the layer of all that is expected has come. LoadBackError when it failed, or when the step's time was up.
        Where nothing is expected it costs a look at a field."""
        if not self._expected:
            return
        with self._changed:
            asked = self._clock()
            self._changed.wait_for(lambda: self._settled(layer), max(0.0, self._left_s))
            self._left_s -= self._clock() - asked
            for job in self._expected:
                if job.error or self._closed:
                    raise LoadBackError(f"load-back {job.number} failed: {job.error or CLOSED}")
                if len(job.marks) <= layer:
                    raise LoadBackError(f"layer {layer} of load-back {job.number} did not come in time")
            marks = [job.marks[layer] for job in self._expected]
        for mark in marks:
            self._join(mark)

    def arrived(self, job: Arriving, mark: Mark) -> None:
        """Its next layer has come."""
        with self._changed:
            job.marks.append(mark)
            self._changed.notify_all()

    def failed(self, job: Arriving, error: str) -> None:
        """No more of it will come, and what has come is worth nothing."""
        with self._changed:
            job.error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing will come any more. Whoever waits raises; with nothing expected, layers are let through as ever."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _settled(self, layer: int) -> bool:
        if self._closed or any(job.error for job in self._expected):
            return True
        return all(len(job.marks) > layer for job in self._expected)
