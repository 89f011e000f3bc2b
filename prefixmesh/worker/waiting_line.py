"""One line of waiting requests: who is oldest, and how many later arrivals were let in before it. Pure.

Whoever is let in passes over all that arrived before it. So of a line the oldest has been passed over by everyone who passed over
any other, and its count is the highest: to bound the count of each, only the oldest need be watched.
"""

from bisect import bisect_right, insort

from prefixmesh.worker.request import Request


class WaitingLine:
    """Requests in order of arrival, which is the order of ``Request.number``."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._overtakers: list[int] = []
        """Numbers of those admitted that arrived after the oldest, ascending. As many as the bound, or as one step admits more."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> Request:
        """Raises StopIteration when nobody waits."""
        return next(iter(self._waiting.values()))

    @property
    def passed_over(self) -> int:
        """How many later arrivals were admitted before the oldest."""
        return len(self._overtakers)

    def add(self, request: Request) -> None:
        """A new arrival. O(1)."""
        self._waiting[request.number] = request

    def remove(self, request: Request, *, admitted: bool) -> None:
        """A request leaves the line, let in or not. O(overtakers)."""
        if admitted:
            insort(self._overtakers, request.number)
        del self._waiting[request.number]
        first = self.oldest.number if self._waiting else request.number
        if self._waiting:
            del self._overtakers[: bisect_right(self._overtakers, first)]
        else:
            self._overtakers.clear()
