"""Chance for generators, from one source of numbers. Pure.

Everything is made from ``random()`` alone: of Python's own source only that is promised to give the same numbers for a seed in every
version, and a workload is named by its seed.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import NormalDist
from typing import Final

_LEAST: Final = 1e-12
"""Logarithms and quantiles of 0 are not finite."""


class Draws:
    """Numbers of the kinds that workloads are made of."""

    def __init__(self, random: Callable[[], float]) -> None:
        """``random`` gives numbers from 0 to below 1: ``random.Random(seed).random``."""
        self._random = random

    def whole(self, least: int, most: int) -> int:
        """A whole number from ``least`` to ``most``, each as likely."""
        return least + int(self._random() * (most - least + 1))

    def exponential(self, mean: float) -> float:
        """A time between events that do not know of each other."""
        return -mean * math.log(max(_LEAST, 1.0 - self._random()))

    def log_normal(self, median: float, spread: float, most: int) -> int:
        """A length of at least 1 and at most ``most``, half of them below ``median``; ``spread`` is the deviation of its logarithm."""
        quantile = min(max(self._random(), _LEAST), 1.0 - _LEAST)
        return min(most, max(1, round(median * math.exp(spread * NormalDist().inv_cdf(quantile)))))

    def pick(self, popularity: "Popularity") -> int:
        """A number below ``len(popularity)``."""
        return popularity.at(self._random())


class Popularity:
    """How often each of several is asked for: the n-th by ``1 / n ** skew`` (Zipf)."""

    def __init__(self, count: int, skew: float) -> None:
        self._sums: Sequence[float] = list(accumulate(1.0 / (rank + 1) ** skew for rank in range(count)))

    def __len__(self) -> int:
        return len(self._sums)

    def at(self, share: float) -> int:
        """Who is asked for by the number ``share`` from 0 to below 1. O(log n)."""
        return min(bisect(self._sums, share * self._sums[-1]), len(self._sums) - 1)
