"""Who can copy KV from whom, as columns: what a decision reads of copies between workers. Pure.

Workers whose KV lies alike can copy from each other. Nobody has to: where no worker has told how long a copy takes, decisions leave copies
out, and pay one look at ``some`` for that.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from prefixmesh.router.measured_rates import Column

Mask = npt.NDArray[np.bool_]

UNABLE_MS: Final = 1e100
"""No copy is quicker than to compute where a token takes so long; not infinite, because nothing times infinity is no number."""


class CopyColumns:
    """Columns over the workers of one router. Not thread-safe. Setters take O(1), but for doubling."""

    ms_per_token: Column
    """Milliseconds to copy a token's KV to this worker; 0 where it cannot be."""

    cost_per_token: Column
    """The same, but beyond all costs where it cannot be."""

    layout: npt.NDArray[np.uint64]
    """Equal ones can copy from each other; 0: from and to nobody."""

    gives: Mask
    """Whether a worker can be copied from: it answers, be it that it takes no requests."""

    given_share: Column
    """1 where a worker has a layout and gives, else 0: how much counts of what it holds."""

    def __init__(self, rows: int) -> None:
        self._table = np.zeros((3, rows))
        self._layouts = np.zeros(rows, dtype=np.uint64)
        self._gives = np.zeros(rows, dtype=np.bool_)
        self._able = 0
        self._one_layout: bool | None = None
        self.cut(0)

    @property
    def some(self) -> bool:
        """Whether anybody can copy from others. O(1)."""
        return self._able > 0

    @property
    def has_one_layout(self) -> bool:
        """Whether all who can copy at all can copy from each other. O(1), and O(rows) after a change."""
        if self._one_layout is None:
            layouts = self.layout[self.layout > 0]
            self._one_layout = len(layouts) == 0 or bool((layouts == layouts[0]).all())
        return self._one_layout

    def set_layout(self, row: int, layout: str) -> None:
        """How KV lies at a worker (``KvLayout.digest``); empty: it copies neither from nor to anybody."""
        named = np.uint64(xxhash.xxh3_64_intdigest(layout.encode()) or 1) if layout else np.uint64(0)
        if self.layout[row] != named:
            self.layout[row] = named
            self._one_layout = None
            self._derive(row)

    def set_rate(self, row: int, ms_per_token: float) -> None:
        """How long a copy to a worker takes a token; 0: it cannot be."""
        if self.ms_per_token[row] != ms_per_token:
            self.ms_per_token[row] = ms_per_token
            self._derive(row)

    def set_gives(self, row: int, *, gives: bool) -> None:
        """Whether a worker can be asked for KV now."""
        if self.gives[row] != gives:
            self.gives[row] = gives
            self._derive(row)

    def clear(self, row: int) -> None:
        """A row is nobody's."""
        self.set_layout(row, "")
        self.set_rate(row, 0.0)
        self.set_gives(row, gives=False)
        self._derive(row)

    def cut(self, rows: int) -> None:
        """Columns are so long from now on, longer than before."""
        while rows > len(self._gives):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._layouts = np.concatenate([self._layouts, np.zeros_like(self._layouts)])
            self._gives = np.concatenate([self._gives, np.zeros_like(self._gives)])
        self.ms_per_token, self.cost_per_token, self.given_share = self._table[:, :rows]
        self.layout = self._layouts[:rows]
        self.gives = self._gives[:rows]

    def _derive(self, row: int) -> None:
        named, rate = bool(self.layout[row]), self.ms_per_token.item(row)
        self._able += (named and rate > 0.0) - (0.0 < self.cost_per_token.item(row) < UNABLE_MS)
        self.cost_per_token[row] = rate if named and rate > 0.0 else UNABLE_MS
        self.given_share[row] = named and self.gives[row]

    def __repr__(self) -> str:
        return f"<CopyColumns {self._able} can copy, {int(self.gives.sum())} can be copied from>"
