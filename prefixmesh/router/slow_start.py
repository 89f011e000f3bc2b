"""Workers that join a running fleet are fed at a paced rate until they are warm. Pure: time is passed in.

A worker that has just joined is idle and holds nothing. Every request that is new to the whole fleet would go to it at once, from every
router, before it has shown how fast it is, while its first prompts still compile and warm what they use. So its share of the decisions
grows, from a tenth of a fair share to the whole of one, and then the cost alone decides. While nobody but newcomers could take a request
nobody is held back.

Pacing is by credit: each decision gives every newcomer its share of one request, and it may be chosen when it has a whole one.
"""

from collections.abc import Iterator
from typing import Final

from prefixmesh.router.fleet_columns import Mask

FIRST_SHARE: Final = 0.1
"""Of a fair share, what a newcomer gets at first: enough to be measured by."""

MOST_CREDIT: Final = 2.0
"""Requests that a newcomer may have saved up: what others got meanwhile is not made good in a burst."""


class SlowStart:
    """The newcomers of one router, by row. Not thread-safe."""

    def __init__(self, warm_up_s: float) -> None:
        """``warm_up_s``: how long a worker is a newcomer; 0 knows none."""
        self._warm_up_s = warm_up_s
        self._joined: dict[int, float] = {}
        self._credit: dict[int, float] = {}

    def __len__(self) -> int:
        """Newcomers."""
        return len(self._joined)

    def joined(self, row: int, now: float) -> None:
        """A worker's life begins: it was added, or has restarted. O(1)."""
        if self._warm_up_s > 0.0:
            self._joined[row] = now
            self._credit[row] = 0.0

    def left(self, row: int) -> None:
        """A row is nobody's any more. No newcomer: nothing happens. O(1)."""
        self._joined.pop(row, None)
        self._credit.pop(row, None)

    def hold_back(self, able: Mask, now: float) -> Mask:
        """Whom of ``able`` the next decision may take. Counts as a decision. O(newcomers), and O(rows) while there are any."""
        if not self._joined:
            return able
        for row in [row for row, since in self._joined.items() if now - since >= self._warm_up_s]:
            self.left(row)
        newcomers = [row for row in self._joined if row < len(able) and able[row]]
        count = int(able.sum())
        if not newcomers or len(newcomers) == count:
            return able
        allowed = able.copy()
        for row, credit in self._grow(newcomers, count, now):
            allowed[row] = credit >= 1.0
        return allowed

    def taken(self, row: int) -> None:
        """A decision took a row. O(1)."""
        if row in self._credit:
            self._credit[row] = max(0.0, self._credit[row] - 1.0)

    def _grow(self, newcomers: list[int], count: int, now: float) -> Iterator[tuple[int, float]]:
        for row in newcomers:
            age = max(0.0, now - self._joined[row]) / self._warm_up_s
            share = FIRST_SHARE + (1.0 - FIRST_SHARE) * age
            self._credit[row] = credit = min(MOST_CREDIT, self._credit[row] + share / count)
            yield row, credit
