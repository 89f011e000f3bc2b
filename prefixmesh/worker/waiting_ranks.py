"""Who of the waiting gives way when the queue is full and somebody of a higher priority comes. Pure.

The lowest priority first, and of that who came last: whoever has waited longest is nearest to its turn. Priority settles this under every
policy: in which order a queue is served, and whom it has no room for, are two questions.
"""

from prefixmesh.worker.request import Request


class WaitingRanks:
    """The waiting that may give way, by priority. All of it is O(different priorities), of which there are 201."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[int, Request]] = {}
        """By number, in order of arrival; none is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._ranks.values()))

    def add(self, request: Request) -> None:
        """Count in a new arrival, unless it is part of something that has begun."""
        if request.may_give_way:
            self._ranks.setdefault(request.priority, {})[request.number] = request

    def remove(self, request: Request) -> None:
        """It waits no longer; not counted in, nothing happens."""
        rank = self._ranks.get(request.priority, {})
        if rank.pop(request.number, None) is not None and not rank:
            del self._ranks[request.priority]

    def last_below(self, priority: int) -> Request | None:
        """Who gives way to a newcomer of ``priority``; None when all matter as much."""
        lowest = min(self._ranks, default=priority)
        if lowest >= priority:
            return None
        return self._ranks[lowest][next(reversed(self._ranks[lowest]))]
