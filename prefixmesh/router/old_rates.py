"""What a measurement counts that was made long ago: a worker that once was slow, and has had nothing to do since, is tried again. Pure.

Who measured itself slow is sent nothing as long as others will do, and who is sent nothing measures nothing: a machine that was loaded when
its worker started, or stood still once, would be left out for ever. So what a worker takes more than those that are quicker fades while it is
idle. It fades with the time since it last rated a prefill, and no faster than others are given requests, or where few come a slow worker
would get one after the other. In the end it is as good as the others, and gets a request. With that the whole of its measurement counts
again until it has made a new one: one request is what a trial costs, and a worker that is slow still is left alone for as long again. Also
where that request had too little to compute for its speed to be rated: else it would pass for quick whenever it is idle.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from prefixmesh.router.fleet_columns import FleetColumns

HALF_LIFE_S: Final = 10.0
"""In which half of a worker's excess is forgotten: one that is ten times slower is tried after a minute, one that is half slower after
twenty seconds."""

HALF_LIFE_TURNS: Final = 1.5
"""So many requests for each worker must have been routed for half of an excess to be forgotten. What is ten times slower is then tried with a
tenth of a fair share at most, where it is forgotten after six or seven halves."""

LEAST_EXCESS: Final = 0.1
"""Who is slower by less is as quick as the others: measured rates wobble by so much."""

TRIED_EXCESS: Final = 2 * LEAST_EXCESS
"""Who is sent a request when no more is left of its excess is tried by that. With more left it was taken for something else, such as what it
holds, and what is new is to come to it yet."""

COMPARED_TOKENS: Final = 2048.0
"""Speeds are compared by the prefill of a prompt of this length: one number of a curve's two."""

LEAST_MS: Final = 1e-9
"""No prompt takes less: who tells of less is compared as if it took so long. A quotient of what nothing ever took would be beyond all numbers."""

_NOTHING: Final = np.array(0.0)
_LEAST_MS: Final = np.array(LEAST_MS)


class OldRates:
    """When which row's worker rated itself last. Not thread-safe; ``now`` is seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._rated: dict[int, int] = {}
        self._since = np.zeros(0)
        self._after = np.zeros(0)
        self._forgiven: set[int] = set()
        """Rows of which no more than ``TRIED_EXCESS`` is left."""

        self._tried: set[int] = set()
        """Those of them that were sent a request since the last review."""

        self.decisions = 0
        """Requests that were routed so far."""

    def routed(self, row: int) -> None:
        """A request is sent there. O(1)."""
        self.decisions += 1
        if row in self._forgiven:
            self._tried.add(row)

    def told(self, row: int, rated: int, now: float) -> None:
        """A worker's report says how often it has rated a prefill, 0 where it does not tell. O(1)."""
        if rated == self._rated.get(row, 0):
            return
        if row >= len(self._since):
            more = np.zeros(max(row + 1, 2 * len(self._since)) - len(self._since))
            self._since, self._after = (np.concatenate([one, more]) for one in (self._since, self._after))
        self._rated[row] = rated
        self._since[row], self._after[row] = now, self.decisions

    def forget(self, row: int) -> None:
        """Another worker, or another life of it. O(1)."""
        self._rated.pop(row, None)
        self._forgiven.discard(row)
        self._tried.discard(row)

    def review(self, columns: FleetColumns, now: float) -> None:
        """Let the excess of those fade that are idle. Call it a few times a second. O(rows * log rows)."""
        for row in self._tried:
            self._since[row], self._after[row] = now, self.decisions
        self._tried.clear()
        self._forgiven.clear()
        rows = np.array([row for row, rated in self._rated.items() if rated and columns.usable[row]], np.intp)
        if len(rows) < 2:
            return
        excess = _excess(columns.prefill_ms_told(COMPARED_TOKENS)[rows])
        fades = (columns.in_flight[rows] == _NOTHING) & (excess > LEAST_EXCESS)
        if not fades.any():
            return
        rows, excess = rows[fades], excess[fades]
        turns = (self.decisions - self._after[rows]) / (HALF_LIFE_TURNS * np.count_nonzero(columns.usable))
        halves = np.minimum((now - self._since[rows]) / HALF_LIFE_S, turns)
        left = excess * 0.5**halves
        self._forgiven.update(rows[left <= TRIED_EXCESS].tolist())
        for row, share in zip(rows.tolist(), (1.0 + left) / (1.0 + excess), strict=True):
            columns.discount_rates(row, share)


def _excess(prefill_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """By what share each takes longer than those that are quicker do on the average; 0 of the quickest, and where nothing was measured."""
    measured_ms = np.where(prefill_ms > _NOTHING, np.maximum(prefill_ms, _LEAST_MS), _NOTHING)
    order = measured_ms.argsort()
    quicker_ms = np.zeros_like(prefill_ms)
    quicker_ms[order[1:]] = measured_ms[order].cumsum()[:-1] / np.arange(1, len(order))
    return (
        np.divide(measured_ms, quicker_ms, out=np.ones_like(measured_ms), where=quicker_ms > _NOTHING) - 1.0
    )
