"""What each worker lacks of the adapters that are wished, and what it has that was taken back. Pure.

A name that the store does not know is nobody's business here.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prefixmesh.router.adapters.orders import WorkerSeen
from prefixmesh.router.adapters.wishes import Wish
from prefixmesh.router.endpoint import Endpoint


class Gaps(NamedTuple):
    """Names of one worker, in the order in which they are to be seen to."""

    lacks: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    """That it has and is to forget."""


NO_GAPS = Gaps()


class GapFinder:
    """Finds gaps, and remembers what it has found of whom nothing has changed: most workers, most of the time."""

    def __init__(self) -> None:
        self._wishes: Mapping[str, Wish] = {}
        self._known: dict[Endpoint, tuple[WorkerSeen, Gaps]] = {}

    def find(self, wishes: Mapping[str, Wish], workers: Iterable[WorkerSeen]) -> dict[Endpoint, Gaps]:
        """The gaps of every worker that has some. Other wishes are another mapping.

        O(workers) while nothing changes, and O(wishes) for each worker that does.
        """
        known = self._known if wishes is self._wishes else {}
        self._wishes, self._known, gaps = wishes, {}, {}
        for seen in workers:
            before = known.get(seen.endpoint)
            its = before[1] if before is not None and before[0] == seen else gaps_of(wishes, seen)
            self._known[seen.endpoint] = (seen, its)
            if its != NO_GAPS:
                gaps[seen.endpoint] = its
        return gaps


def gaps_of(wishes: Mapping[str, Wish], seen: WorkerSeen) -> Gaps:
    """One worker's. O(wishes)."""
    lacks = [name for name, wish in wishes.items() if wish.is_lacking(seen)] if seen.is_ready else []
    leaves = [name for name in seen.adapters if name in wishes and wishes[name].record.is_removed]
    if not (lacks or (leaves and seen.is_reachable)):
        return NO_GAPS
    # What it does not have at all comes before what it has another content of: that answers requests meanwhile.
    lacks.sort(key=lambda name: (name in seen.adapters, name))
    return Gaps(tuple(lacks), tuple(sorted(leaves)) if seen.is_reachable else ())
