"""How many pages those who run will need at once, beyond what they have, before enough of them have ended. Pure arithmetic.

All grow together, a token a step, and whoever ends gives back what it alone had. So the need rises until somebody ends, falls,
and rises again; only just before an end can it be at its highest::

    pages     /|   /|
             / | /  |  /|
            /  |/   |/  |         answers that began at different times hardly need more than they have;
        now    1st  2nd  3rd end  answers that began together need it all
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Growth(NamedTuple):
    """One request's."""

    pages: int
    """Pages that it is expected to take still."""

    gives_back: int
    """Pages that it has by now and that nobody else has: back when it ends."""


def most_needed(growths: Sequence[Growth]) -> int:
    """The most pages beyond today's that are needed at any time from now on, if all grow as expected. O(n log n)."""
    if not growths:
        return 0
    pages = np.fromiter((growth.pages for growth in growths), np.int64, len(growths))
    gives_back = np.fromiter((growth.gives_back for growth in growths), np.int64, len(growths))
    by_end = pages.argsort()
    pages, gives_back = pages[by_end], gives_back[by_end]
    still_there = np.arange(len(growths), 0, -1)
    back_by_then = np.cumsum(gives_back) - gives_back
    return max(0, int((still_there * pages - back_by_then).max()))
