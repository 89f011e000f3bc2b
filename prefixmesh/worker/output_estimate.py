"""How long answers become: what an admission keeps room for. Pure; it learns from the answers that ended.

``max_tokens`` says how long an answer may become, and mostly it stays far below: keeping room for all of it leaves the pool idle,
keeping none preempts. The last answers tell. One that was cut by its own limit tells only that it would have become longer than
that, and counts so (the product-limit estimate of Kaplan and Meier): a short limit does not make answers look short.

How much of the expected room is really kept is learnt as well (``caution``). Kept whole, nobody gives way and much of the pool is
idle; it falls with every answer that ends, and rises with every preemption.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW: Final = 256
"""Answers remembered: enough for a tail, few enough to follow a change of traffic."""

TRUSTED_ENDS: Final = 8
"""With fewer answers than this, what they say is mixed with ``PRIOR_SHARE``."""

PRIOR_SHARE: Final = 0.5
"""Of what an answer may still become, what is expected when nothing is known."""

MIN_AHEAD_TOKENS: Final = 16
"""An estimate looks at least so far ahead, so that it is not made anew with every token."""

MOST_CAUTION: Final = 1.0
LEAST_CAUTION: Final = 0.1
CAUTION_PER_END: Final = 0.95
CAUTION_PER_PREEMPTION: Final = 1.1
"""Where answers are as long as expected, the two meet at one preemption for every two answers: fewer leave more of the pool idle
than the preempted have to compute again (`docs/engine.md` has the figures)."""


class OutputEstimate:
    """What is known of the lengths of answers, in tokens."""

    def __init__(self, constant_tokens: int | None = None) -> None:
        """With ``constant_tokens`` nothing is learnt: every answer is expected to become so much longer than it is."""
        self._constant = constant_tokens
        self._ends: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        """Length, and whether it was cut."""
        self._sum = 0
        """Of their lengths."""

        self._curve: _Curve | None = None
        """Of the ends; None since one came."""

        self.caution = MOST_CAUTION
        """Share of the expected room that an admission keeps."""

    @property
    def mean_tokens(self) -> float:
        """Mean length of the answers that ended last, whatever ended them: how long a place is taken. 0 before the first."""
        return self._sum / len(self._ends) if self._ends else 0.0

    def ended(self, output_tokens: int, *, by_itself: bool) -> None:
        """An answer ended; not ``by_itself`` when its limit cut it. O(1)."""
        forgotten = self._ends[0][0] if len(self._ends) == WINDOW else 0
        self._ends.append((output_tokens, not by_itself))
        self._sum += output_tokens - forgotten
        self._curve = None
        if self._constant is None:
            self.caution = max(LEAST_CAUTION, self.caution * CAUTION_PER_END)

    def preempted(self) -> None:
        """Too little room was kept. O(1)."""
        if self._constant is None:
            self.caution = min(MOST_CAUTION, self.caution * CAUTION_PER_PREEMPTION)

    def total_tokens(self, output_tokens: int, max_tokens: int) -> int:
        """How long an answer is expected to become that has ``output_tokens`` and may have ``max_tokens``. O(window), and O(window log window) when an
        answer has ended since."""
        if self._constant is not None:
            return min(output_tokens + self._constant, max_tokens)
        prior = output_tokens + PRIOR_SHARE * (max_tokens - output_tokens)
        trust = min(1.0, len(self._ends) / TRUSTED_ENDS)
        learnt = self._survivors_mean(output_tokens, max_tokens) if self._ends else prior
        expected = trust * learnt + (1.0 - trust) * prior
        return min(max_tokens, max(round(expected), output_tokens + MIN_AHEAD_TOKENS))

    def _survivors_mean(self, output_tokens: int, max_tokens: int) -> float:
        """Mean length, cut at ``max_tokens``, of those that became longer than ``output_tokens``; twice that when none has."""
        if self._curve is None:
            self._curve = _curve_of(self._ends)
        lengths, survival = self._curve
        beyond = int(np.searchsorted(lengths, output_tokens, side="right"))
        lengths = lengths[beyond:]
        if not len(lengths):
            return 2.0 * output_tokens
        edges = np.concatenate([[output_tokens], lengths.clip(max=max_tokens), [max_tokens]])
        # Among the survivors, the share that becomes longer than each edge: 1 at the first.
        shares = survival[beyond:] / survival[beyond]
        return float(output_tokens + (shares * np.diff(edges)).sum())


class _Curve(NamedTuple):
    lengths: npt.NDArray[np.int64]
    """Ascending."""

    survival: npt.NDArray[np.float64]
    """The share of all answers that became longer than each length, after a first 1; one more than there are lengths."""


def _curve_of(ends: Iterable[tuple[int, bool]]) -> _Curve:
    lengths, cut = np.array(sorted(ends), dtype=np.int64).T
    at_risk = np.arange(len(lengths), 0, -1)
    return _Curve(lengths, np.concatenate([[1.0], np.cumprod(1.0 - (1 - cut) / at_risk)]))
