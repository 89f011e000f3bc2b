"""Which of many things ends first: a heap whose entries may be changed and forgotten, and which does not grow by that.

What is changed or forgotten leaves its old entry in the heap, to be thrown away when it comes to the top (lazy deletion), or
all at once when such entries are the most: so something that is renewed a million times costs one place, not a million.
"""

import heapq
import math
from typing import Final, Generic, TypeVar

T = TypeVar("T")

STALE_ENTRIES: Final = 16
"""Dead entries a heap may hold beside as many as it has living ones: rebuilding it for fewer would cost more than they do."""


class Deadlines(Generic[T]):
    """Things by when they end; things are compared by identity or hash, never by order."""

    __slots__ = ("_current", "_heap", "_serial", "soonest")

    def __init__(self) -> None:
        self.soonest = math.inf
        """When the first one ends; infinite when none does."""
        self._heap: list[tuple[float, int, T]] = []
        """(when, serial, thing): the serial decides between equal times, so that things are never compared."""
        self._current: dict[T, tuple[float, int]] = {}
        """The one entry of each thing that counts."""
        self._serial = 0

    def set(self, thing: T, when: float) -> None:
        """Let ``thing`` end at ``when``, whatever was said before. Amortised O(log n)."""
        self._serial += 1
        self._current[thing] = (when, self._serial)
        heapq.heappush(self._heap, (when, self._serial, thing))
        self._tidy()

    def forget(self, thing: T) -> None:
        """Let ``thing`` never end; it may have had no end. Amortised O(log n)."""
        if self._current.pop(thing, None) is not None:
            self._tidy()

    def first(self) -> T | None:
        """The one that ends first, at ``soonest``; None when none ends. O(1)."""
        return self._heap[0][2] if self._heap else None

    def when(self, thing: T) -> float | None:
        """When ``thing`` ends; None when it does not. O(1)."""
        entry = self._current.get(thing)
        return entry[0] if entry else None

    def __len__(self) -> int:
        """How many things end."""
        return len(self._current)

    @property
    def entries(self) -> int:
        """Entries in the heap, dead ones included: at most ``2 * len(self) + STALE_ENTRIES``."""
        return len(self._heap)

    def _tidy(self) -> None:
        """Keep the heap's size within its bound, and its top alive."""
        heap, current = self._heap, self._current
        if len(heap) > 2 * len(current) + STALE_ENTRIES:
            heap[:] = [(when, serial, thing) for thing, (when, serial) in current.items()]
            heapq.heapify(heap)
        while heap and current.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
        self.soonest = heap[0][0] if heap else math.inf
