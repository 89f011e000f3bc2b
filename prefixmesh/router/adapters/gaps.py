"""What each worker lacks of the adapters that are wished, and what it has that was taken back. Pure.

A worker has a name as it is wished when it tells the very content that the name's newest generation turned out to be. While no worker has
loaded that generation, nobody can tell what it is, and all lack it. A name that the store does not know is nobody's business here.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prefixmesh.router.adapters.orders import WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord
from prefixmesh.router.endpoint import Endpoint


class Wish(NamedTuple):
    """One name of the store."""

    record: AdapterRecord
    digest: str
    """Of the content that all are to have; empty while that is not known."""

    def is_held(self, seen: WorkerSeen) -> bool:
        """Whether the worker has it as it is wished. O(1)."""
        name = self.record.name
        return (
            self.digest != ""
            and seen.adapters.get(name) == self.digest
            and (name in seen.pinned) == self.record.spec.pinned
        )


class Gaps(NamedTuple):
    """Names of one worker, sorted."""

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
        self._wishes, self._known, found = wishes, {}, {}
        for seen in workers:
            before = known.get(seen.endpoint)
            gaps = before[1] if before is not None and before[0] == seen else gaps_of(wishes, seen)
            self._known[seen.endpoint] = (seen, gaps)
            if gaps != NO_GAPS:
                found[seen.endpoint] = gaps
        return found


def gaps_of(wishes: Mapping[str, Wish], seen: WorkerSeen) -> Gaps:
    """One worker's. O(wishes)."""
    lacks, leaves = [], []
    for name, wish in wishes.items():
        if not wish.record.is_removed:
            if seen.is_ready and not wish.is_held(seen):
                lacks.append(name)
        elif seen.is_reachable and name in seen.adapters:
            leaves.append(name)
    if not (lacks or leaves):
        return NO_GAPS
    # What it does not have at all comes before what it has another content of: that answers requests meanwhile.
    return Gaps(tuple(sorted(lacks, key=lambda name: (name in seen.adapters, name))), tuple(sorted(leaves)))
