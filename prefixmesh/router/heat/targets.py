"""How many workers are to hold what is asked for so much, and for how long they are to go on when it is asked for less. Pure.

*Load* is counted in workers: what keeps one worker busy all the time is 1. A holder is to spend no more on one prefix than a worker spends
on everything on the average, and a little; so a prefix that is most of the traffic is spread over most of the fleet, and one that is as much as the next is not
copied at all. In a fleet that idles nobody has to be relieved, and in one that is full even an average share is too much::

    target = ceil(load / (TOLERATED * clip(mean load of a worker, LEAST_SHARE, MOST_SHARE)))
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TOLERATED: Final = 1.15
"""So many times the average a holder may be busy with one prefix. Closer to 1, chance alone would make and drop replicas; further off, a
holder's queue is what spreads its traffic, and each request that leaves it pays."""

LEAST_SHARE: Final = 0.1
"""Of a worker: holders that are busy with a prefix for less are not relieved. A replica takes room from what others have cached."""

MOST_SHARE: Final = 0.5
"""Of a worker: beyond half, requests wait for each other much longer than they take."""

DOUBT: Final = 2.0
"""A load that was seen in ``n`` requests may be chance by one part in the root of ``n``, and is taken for so many times that less: what is as
hot as others is not replicated for a few requests that happened to come together."""

LET_GO_S: Final = 60.0
"""A target falls only when it has been lower for so long, and then to the highest of that time. It rises at once: a copy that comes late is paid
for in waiting, one that is kept a minute longer in some room."""


def target_of(load: float, requests: float, mean_load: float, most: int) -> int:
    """Workers that are to hold what makes this ``load``, seen in so many ``requests``: at least one and at most ``most``."""
    share = TOLERATED * min(max(mean_load, LEAST_SHARE), MOST_SHARE)
    certain = load * max(0.0, 1.0 - DOUBT / math.sqrt(max(requests, 1.0)))
    return max(1, min(most, math.ceil(certain / share)))


@dataclass(slots=True)
class _Kept:
    target: int
    lower_since: float | None = None
    highest: int = 0
    """Of what was lower, since then."""


class Targets:
    """Targets by name, slow to fall. A target of 1 is none."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def step(self, wanted: Mapping[str, int], now: float) -> Mapping[str, int]:
        """What is wanted now, and what is to be held: those above 1. O(names)."""
        for name, target in wanted.items():
            if target > 1 and name not in self._kept:
                self._kept[name] = _Kept(target)
        for name, kept in list(self._kept.items()):
            if _settle(kept, wanted.get(name, 1), now) <= 1:
                del self._kept[name]
        return {name: kept.target for name, kept in self._kept.items()}

    def __repr__(self) -> str:
        return f"<Targets { ({name: kept.target for name, kept in self._kept.items()}) }>"


def _settle(kept: _Kept, wanted: int, now: float) -> int:
    if wanted >= kept.target:
        kept.target, kept.lower_since = wanted, None
    elif kept.lower_since is None:
        kept.lower_since, kept.highest = now, wanted
    else:
        kept.highest = max(kept.highest, wanted)
        if now - kept.lower_since >= LET_GO_S:
            kept.target, kept.lower_since = kept.highest, None
    return kept.target
