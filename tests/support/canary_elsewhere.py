"""Copies whose other end is no canary pool: KV that arrives from a disk or another worker, and host copies that are read for one.

As a ``CanaryCopy``, each guards its pages from its beginning to its end, and ends once, *before* whoever owns the pages is told.
"""

from prefixmesh.cache.base import PageIndices
from tests.support.canary_pool import CACHED, IN_FLIGHT, UNCLAIMED, CanaryError, CanaryPool, Chain


class CanaryArrival:
    """KV of ``chain`` from position ``start`` on, on its way into ``pages``."""

    def __init__(self, target: CanaryPool, pages: PageIndices, chain: Chain, start: int) -> None:
        if (target.owners[pages] != UNCLAIMED).any():
            raise CanaryError("a page that is fetched to should be claimed by nobody")
        self._target, self._pages = target, pages.copy()
        self._slots = target.slots(self._pages)
        self._rows = chain.rows(start, start + len(self._slots))
        target.owners[self._pages] = IN_FLIGHT

    def finish(self) -> None:
        """It is there, and may be read once it is cached."""
        self._end()
        target, slots, rows = self._target, self._slots, self._rows
        target.namespaces[slots], target.positions[slots], target.tokens[slots], target.digests[slots] = rows
        target.owners[self._pages] = CACHED
        target.copied += len(slots)

    def cancel(self) -> None:
        """It will not come."""
        self._end()
        self._target.owners[self._pages] = UNCLAIMED

    def _end(self) -> None:
        if (self._target.owners[self._pages] != IN_FLIGHT).any():
            raise CanaryError("what is fetched ends twice, or somebody has taken its pages")


class CanaryReading:
    """Pages that are read for elsewhere and must hold ``chain`` from its first position on, from the beginning to the end."""

    def __init__(self, source: CanaryPool, pages: PageIndices, chain: Chain) -> None:
        self._source, self._pages, self._chain = source, pages.copy(), chain
        source.copies_from[self._pages] += 1
        source.read_pages(self._pages, chain)

    def finish(self) -> None:
        """It has been read."""
        self.cancel()
        self._source.read_pages(self._pages, self._chain)

    def cancel(self) -> None:
        """It will not be read."""
        self._source.copies_from[self._pages] -= 1
