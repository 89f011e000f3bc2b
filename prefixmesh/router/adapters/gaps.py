"""What each worker lacks of the adapters that are wished, and what it has that was taken back. Pure.

A name that the store does not know is nobody's business here.
"""

from collections.abc import Container, Iterable, Mapping
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


class _Known(NamedTuple):
    """What was found of a worker."""

    seen: WorkerSeen
    gaps: Gaps
    by: Mapping[str, Wish]


class GapFinder:
    """Finds gaps, and remembers what it has found: of most workers nothing changes most of the time, and of the wishes one at a time does."""

    def __init__(self) -> None:
        self._wishes: Mapping[str, Wish] = {}
        self._before: Mapping[str, Wish] = {}
        self._changed: frozenset[str] = frozenset()
        """Names that are wished otherwise than before."""

        self._known: dict[Endpoint, _Known] = {}

    def find(self, wishes: Mapping[str, Wish], workers: Iterable[WorkerSeen]) -> dict[Endpoint, Gaps]:
        """The gaps of every worker that has some; ``workers`` are all there are. Other wishes are another mapping.

        O(workers) while nothing changes; O(wishes) for each worker that does, and O(workers) for each wish that does.
        """
        self.look(wishes, workers)
        self._known = {seen.endpoint: self._known[seen.endpoint] for seen in workers}
        return {endpoint: known.gaps for endpoint, known in self._known.items() if known.gaps != NO_GAPS}

    def look(self, wishes: Mapping[str, Wish], workers: Iterable[WorkerSeen]) -> None:
        """The same for some of the workers, ahead of ``find``, which then has the less to do."""
        if wishes is not self._wishes:
            self._before, self._wishes = self._wishes, wishes
            names = self._before.keys() | wishes.keys()
            self._changed = frozenset(
                name for name in names if self._before.get(name) is not wishes.get(name)
            )
        for seen in workers:
            known = self._known.get(seen.endpoint)
            is_same = known is not None and known.seen == seen
            if known is not None and is_same and known.by is wishes:
                continue
            if known is not None and is_same and known.by is self._before:
                gaps = _patched(known.gaps, gaps_of(wishes, seen, self._changed), self._changed, seen)
            else:
                gaps = gaps_of(wishes, seen, wishes.keys())
            self._known[seen.endpoint] = _Known(seen, gaps, wishes)


def gaps_of(wishes: Mapping[str, Wish], seen: WorkerSeen, names: Iterable[str]) -> Gaps:
    """One worker's gaps among these names. O(names)."""
    lacks, leaves = [], []
    for name in names:
        wish = wishes.get(name)
        if wish is None:
            continue
        if seen.is_ready and wish.is_lacking(seen):
            lacks.append(name)
        elif wish.is_removed and seen.is_reachable and name in seen.adapters:
            leaves.append(name)
    return _sorted(lacks, leaves, seen) if lacks or leaves else NO_GAPS


def _patched(before: Gaps, news: Gaps, changed: Container[str], seen: WorkerSeen) -> Gaps:
    """What was found before, but for the names that have changed."""
    lacks = [*(name for name in before.lacks if name not in changed), *news.lacks]
    leaves = [*(name for name in before.leaves if name not in changed), *news.leaves]
    return _sorted(lacks, leaves, seen) if lacks or leaves else NO_GAPS


def _sorted(lacks: list[str], leaves: list[str], seen: WorkerSeen) -> Gaps:
    """What a worker does not have at all comes before what it has another content of: that answers requests meanwhile."""
    lacks.sort(key=lambda name: (name in seen.adapters, name))
    return Gaps(tuple(lacks), tuple(sorted(leaves)))
