"""How many pages those who run will need at once, beyond what they have, before enough of them have ended. Pure arithmetic.

All grow together, a token a step, and whoever ends gives back what it alone had. So the need rises until somebody ends, falls,
and rises again; only just before an end can it be at its highest::

    pages     /|   /|
             / | /  |  /|
            /  |/   |/  |         answers that began at different times hardly need more than they have;
        now    1st  2nd  3rd end  answers that began together need it all
"""

from typing import NamedTuple

import numpy as np


class Growth(NamedTuple):
    """One request's."""

    pages: int
    """Pages that it is expected to take still."""

    gives_back: int
    """Pages that it has by now and that nobody else has: back when it ends."""


def most_needed(growths: list[Growth]) -> int:
    """The most pages beyond today's that are needed at any time from now on, if all grow as expected. O(n log n)."""
    if not growths:
        return 0
    pages, gives_back = np.array(sorted(growths), dtype=np.int64).T
    still_there = np.arange(len(growths), 0, -1)
    back_by_then = np.cumsum(gives_back) - gives_back
    return max(0, int((still_there * pages - back_by_then).max()))
