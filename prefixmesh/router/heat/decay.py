"""Rates that forget: sums whose parts fade with time, kept without touching them as time passes. Pure.

What comes now is booked with a weight that grows with time, ``exp((now - begin) / FADE_S)``; a rate is a sum over the weight of now. So
sums of different ages can be compared as they are, and each costs an addition (forward decay: Cormode, Shkapenyuk, Srivastava and Xu,
2009). The weights would outgrow a float in the end; long before that, everything begins anew with smaller ones.
"""

import math
from typing import Final

FADE_S: Final = 15.0
"""What happened so long ago counts a third (1 / e). Half of a new rate is seen after ten seconds; one request a second leaves a quarter to
chance, which ``targets`` allows for."""

YOUNG_S: Final = 2.0
"""What is younger is taken for so old: the first two requests of a prefix come at no rate that anybody could know."""

SCALES: Final = 20.0
"""So many times FADE_S after its beginning, five minutes, a clock begins anew: e to the twentieth, half a thousand million, leaves a float
half its digits."""


class DecayClock:
    """The weight of now. ``now`` never goes back."""

    __slots__ = ("_begin", "weight")

    def __init__(self) -> None:
        self._begin: float | None = None
        self.weight = 1.0
        """What comes now is booked with this."""

    def tick(self, now: float) -> float:
        """Let time pass; the weight of now. O(1)."""
        if self._begin is None:
            self._begin = now
        self.weight = math.exp((now - self._begin) / FADE_S)
        return self.weight

    def rescale(self, now: float) -> float:
        """What all sums are to be multiplied by, as this clock begins anew; 1 while it need not. Call it every few minutes at least."""
        if self._begin is None or now - self._begin < SCALES * FADE_S:
            return 1.0
        factor = math.exp((self._begin - now) / FADE_S)
        self._begin, self.weight = now, 1.0
        return factor

    def per_s(self, total: float, since: float, now: float) -> float:
        """The rate a second of what was booked as ``total`` since then, at the weight of the last ``tick``. A sum that is young has not seen
        as much as it will, and is taken for as much more."""
        age_s = max(now - since, YOUNG_S)
        return total / (self.weight * FADE_S * -math.expm1(-age_s / FADE_S))
