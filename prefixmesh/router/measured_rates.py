"""How fast workers have measured themselves to be, as columns, with the gaps filled. Pure.

What a worker has not measured is taken from the mean of those that have (a fleet is mostly alike), and from a prior where none has.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

PRIOR_PREFILL_MS_PER_TOKEN: Final = 0.5
"""Assumed where nobody in the fleet has measured: a small model on a few CPU cores. Decisions depend on the ratios of rates only."""

PRIOR_DECODE_STEP_MS: Final = 30.0
"""Assumed time of one decode step where nobody has measured."""

PRIOR_LOAD_BACK_SHARE: Final = 0.1
"""Of the time to compute a token, so much is assumed to bring its KV back from the host where nobody has measured: a copy of some ten or
hundred kB against the arithmetic of a whole model. A share, because both are as fast as the machine is: a time that is little for a CPU would
leave a GPU's host tier out of every decision, and what is never used is never measured."""

PRIOR_ADAPTER_LOAD_MS: Final = 100.0
"""Assumed time to bring an adapter's weights into a worker's memory where nobody has measured: some ten MB read and copied."""


class RateColumns(NamedTuple):
    """Columns of rates, in milliseconds."""

    linear: Column
    """Of prefill, a token: the linear part of its curve."""

    quadratic: Column
    """Of prefill, a token squared. None of a worker that has measured a linear part only."""

    decode_step: Column
    load_back: Column
    """A token's KV from the host; 0 where nobody has measured it. ``load_back_ms`` has the gaps filled."""

    adapter_load: Column


_PRIORS: Final = RateColumns(
    np.array(PRIOR_PREFILL_MS_PER_TOKEN),
    np.array(0.0),
    np.array(PRIOR_DECODE_STEP_MS),
    np.array(0.0),
    np.array(PRIOR_ADAPTER_LOAD_MS),
)
_TELLERS: Final = (0, 0, 2, 3, 4)
"""The rate whose being there tells that each was measured: a curve without a bend is no gap."""

_OF_COMPUTING: Final = slice(0, 3)
"""Of the rates, those of prefill and decoding."""


def load_back_ms(rates: RateColumns) -> Column:
    """Milliseconds to bring a token's KV back from the host, by row; where nobody has measured it, a share of what its prefill takes there.
    O(rows)."""
    column: Column = np.where(
        rates.load_back > 0.0, rates.load_back, rates.linear * np.array(PRIOR_LOAD_BACK_SHARE)
    )
    return column


class MeasuredRates:
    """Measured rates by row, 0 where nothing was measured; sums make the mean of those that were. An old measurement may count less."""

    def __init__(self, rows: int) -> None:
        self._told = np.zeros((len(_PRIORS), rows))
        self._table = np.zeros_like(self._told)
        self._sums = [0.0] * len(_PRIORS)
        self._counts = [0] * len(_PRIORS)
        self._open = 0
        self._filled: RateColumns | None = None

    def open(self) -> None:
        """One row more is in use; it has measured nothing. O(1)."""
        self._open += 1
        self._filled = None

    def close(self, row: int) -> None:
        """A row is not in use any more. O(1)."""
        self.set(row, (0.0,) * len(_PRIORS))
        self._open -= 1
        self._filled = None

    def set(self, row: int, rates: tuple[float, ...]) -> bool:
        """What a row's worker has measured, in the order of ``RateColumns``; False when that is known. O(1)."""
        known = tuple(self._told[:, row].tolist())
        if known == rates:
            return False
        for rate, (old, new) in enumerate(zip(known, rates, strict=True)):
            if old == new:
                continue
            self._sums[rate] += new - old
            self._counts[rate] += (new > 0.0) - (old > 0.0)
            if not self._counts[rate]:
                self._sums[rate] = 0.0  # sums of floats drift
            if not (old and new) or self._counts[rate] < self._open:
                self._filled = None
        self._told[:, row] = self._table[:, row] = rates
        return True

    def discount(self, row: int, share: float) -> None:
        """Count a row's computing as if it took this share of what was told, until it tells another rate; 1 counts it whole again. O(1), and
        O(rows) at the next reading while somebody has not measured."""
        self._table[_OF_COMPUTING, row] = self._told[_OF_COMPUTING, row] * share
        if any(count < self._open for count in self._counts):
            self._filled = None

    def prefill_ms_told(self, rows: int, tokens: float) -> Column:
        """What a prompt of this length takes at the first so many rows by what they told; 0 where nothing was. O(rows)."""
        linear, quadratic = self._told[:2, :rows]
        column: Column = tokens * linear + (tokens * tokens) * quadratic
        return column

    def cut(self, rows: int) -> None:
        """Columns are so long from now on, longer than before. O(1), but for doubling."""
        if rows > self._table.shape[1]:
            self._told, self._table = (
                np.concatenate([table, np.zeros_like(table)], axis=1) for table in (self._told, self._table)
            )
        self._columns: list[Column] = list(self._table[:, :rows])
        self._filled = None

    def filled(self) -> RateColumns:
        """What was measured as it is, for as long as everybody has; else with means or priors between."""
        if self._filled is None:
            self._filled = RateColumns(*map(self._filled_column, range(len(_PRIORS))))
        return self._filled

    def _filled_column(self, rate: int) -> Column:
        teller = _TELLERS[rate]
        count = self._counts[teller]
        if count == self._open:
            return self._columns[rate]
        mean = self._sums[rate] / count if count else _PRIORS[rate]
        column: Column = np.where(self._columns[teller] > 0.0, self._columns[rate], mean)
        return column
