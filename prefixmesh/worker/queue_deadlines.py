"""Until when requests may wait for their first admission: the earliest limit first, so that looking costs what has expired. Pure.

There are two: how long somebody wants a request to wait at most, and when it must begin so that its answer ends before its caller's deadline.
"""

import heapq
import math
from typing import Final

from prefixmesh.worker.request import Phase, Request

SLACK: Final = 64
"""Entries of requests that wait no longer, beyond as many as wait, before they are thrown out."""


class QueueDeadlines:
    """The deadlines of those that wait. Whoever was admitted or has ended is forgotten by and by."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Watch a request, if it has a limit. O(log waiting)."""
        limit = min(request.queue_deadline, request.latest_begin)
        if limit != math.inf:
            heapq.heappush(self._entries, (limit, request.number, request))

    def take_expired(self, now: float) -> list[Request]:
        """Those whose time is over and that were never admitted, the earliest first. O(expired log waiting)."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            request = heapq.heappop(self._entries)[2]
            if request.phase is Phase.WAITING:
                expired.append(request)
        return expired

    def forget_others(self, waiting: int) -> None:
        """Throw out entries of those that wait no longer, once they outnumber the ``waiting``. O(1) amortised."""
        if len(self._entries) > 2 * waiting + SLACK:
            self._entries = [entry for entry in self._entries if entry[2].phase is Phase.WAITING]
            heapq.heapify(self._entries)


def queue_deadline(now: float, *timeouts_s: float) -> float:
    """When a request that arrives now has waited long enough: by the least timeout that is not 0; never without one, or with one that
    is infinite."""
    if math.inf in timeouts_s:
        return math.inf
    return now + min((timeout for timeout in timeouts_s if timeout), default=math.inf)
