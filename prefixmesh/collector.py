"""When Python's garbage collector may walk what: between steps what is new, and everything only when nobody waits.

The collector looks for objects that only refer to each other. Left to itself it walks old objects in the middle of whatever step
makes one object too many, and a cache of 125,000 nodes takes it 100 to 300 ms (nodes lie scattered in memory). It finds next to
nothing: a tree node and its parent do refer to each other, but a node that is evicted or flushed is unlinked first, so its last
reference frees it at once, collector or not (a test holds that). What is left are the odd cycles of libraries and exceptions.

Two things about its automatic mode, the same on Python 3.11, 3.12 and 3.13 (they differ in *when* it runs: within the allocation
that is one too many, or from 3.12 on between two bytecodes soon after; and 3.13 counts to 2,000 where the others count to 700):

* Full collections come once enough has been promoted to the oldest generation. A third threshold that is never reached ends that.
* The young generations are counted by allocations *minus* deallocations. A cache that evicts as much as it inserts stays near
  zero while ever more of its nodes are "young", and the burst that comes at last has them all walked: 14 ms were seen for 25,000
  of them. So the young must be walked on purpose, while they are few: after every step, for 3 µs and 0.2 µs an object.

The automatic mode stays on for the young, with the interpreter's own thresholds, for a step that makes thousands of objects.
Python 3.14's third threshold is documented to be ignored; what this does there has not been tried.
"""

import gc
from typing import Final

NEVER: Final = 2**31 - 1
"""The greatest threshold there is."""

MIDDLE: Final = 1
"""The generation whose collection walks all that is young, and makes old what it leaves."""

WORTH_A_FULL_COLLECTION: Final = 200_000
"""Objects that came and stayed since the last full collection, from which an idle moment is used for one. Fewer cannot hold
enough garbage (some 20 MB if all of it were) to be worth a pause in which a request may arrive."""

TOO_MANY_WHILE_BUSY: Final = 20_000_000
"""The same, after which a full collection is made though there is work: 2 GB if all of it were garbage, hours to days of
inserts. An engine that is not idle for a moment before that pauses once rather than growing without bound."""


def freeze_what_stays() -> None:
    """For a process that is about to serve: collect once, and have no collection walk again what is alive, which is as good as all that
    it will ever keep. What a router's modules and its tokenizer have made takes 29 ms to walk, out of the middle of some request.
    O(objects alive)."""
    gc.collect()
    gc.freeze()


class StepCollector:
    """The garbage collection of a process that works in steps; one per process, because the collector is.

    Make it when what lives as long as the process is there: it collects once, freezes what is alive (no collection walks that
    again) and changes the process's thresholds. O(objects alive).
    """

    def __init__(self) -> None:
        freeze_what_stays()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self.stayed = 0
        """Objects that came in a step and were not freed in it, since the last full collection: garbage is always among them.
        What an automatic collection within a step has walked is missing, and what was freed in a later step is still there."""

    def after_step(self) -> None:
        """Walk what the step has made. O(objects made since the last call and still alive)."""
        self.stayed += gc.get_count()[0]
        gc.collect(MIDDLE)
        if self.stayed >= TOO_MANY_WHILE_BUSY:
            self._collect_all()

    def when_idle(self) -> None:
        """Walk everything if enough has come to be worth it. O(1), or O(objects alive)."""
        if self.stayed >= WORTH_A_FULL_COLLECTION:
            self._collect_all()

    def _collect_all(self) -> None:
        gc.collect()
        self.stayed = 0
