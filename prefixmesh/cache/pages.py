"""The pages of one KV pool that nobody owns, as a stack of indices.

Only indices live here, never KV. Whoever is given pages owns them until it gives them back: a request's private tail, or,
after an insert, a tree node. The allocator knows only free from not free, which is enough to refuse a page that comes back
twice before it could be given to two owners.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import ConfigError, InternalError, InvariantError

_UINT32: Final = np.dtype(np.uint32)

_FEW: Final = 3
"""Pages that are freed one by one: as many as that takes less time for than one round of NumPy calls."""

_NOT_FREE: Final = 0
"""Mark of a page that somebody owns; a free page is marked with its place in the stack, counted from 1."""


class PageAllocator:
    """Gives out page indices ``0 .. total_pages-1``, last freed first, because those are likeliest still in a cache."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise ConfigError(f"total_pages must be at least 1, got {total_pages}")
        # stack[top:] are the free pages, the next to be given out first; what lies before is scratch.
        self._stack = np.arange(total_pages, dtype=np.int32)
        self._places = np.arange(1, total_pages + 1, dtype=np.int32)
        self._mark = self._places.copy()
        self._top = 0
        self._total = total_pages

    @property
    def free_pages(self) -> int:
        """Pages that ``allocate`` could give now."""
        return self._total - self._top

    @property
    def total_pages(self) -> int:
        """Pages of the pool, free or not."""
        return self._total

    def allocate(self, n: int) -> PageIndices | None:
        """Take ``n`` pages, or None when fewer are free: never some of them. O(n)."""
        if n < 0:
            raise InternalError(f"cannot allocate {n} pages")
        top = self._top
        if n > self._total - top:
            return None
        pages = self._stack[top : top + n].copy()
        self._mark[pages.astype(np.intp)] = _NOT_FREE
        self._top = top + n
        return pages

    def free(self, pages: PageIndices) -> None:
        """Give pages back; O(n). The next ``allocate`` gives them out in the order in which they came.

        Raises InternalError, having freed none, when a page is free already, is named twice, or is not of this pool.
        """
        n = len(pages)
        if n <= _FEW:
            self._free_few(pages)
            return
        top = self._top
        if n > top:
            raise InternalError(f"double free: {n} pages come back, {top} are out")
        # As uint32 first: a negative index becomes huge and is refused instead of wrapping round. As intp then: NumPy would
        # convert any other type at each of the three uses, at five times the cost.
        index = pages.view(_UINT32).astype(np.intp)
        mark = self._mark
        try:
            marks = mark[index].tobytes()
        except IndexError as error:
            raise InternalError(f"pages outside the pool of {self._total}: {_some(pages)}") from error
        if marks != bytes(len(marks)):  # some are not _NOT_FREE
            raise InternalError(f"double free of pages {_some(index[mark[index] != _NOT_FREE])}")
        places = self._places[top - n : top]
        mark[index] = places
        # A page named twice took the mark of its last mention, so its first mention no longer reads its own place.
        if mark[index].tobytes() != places.tobytes():
            mark[index] = _NOT_FREE
            raise InternalError(f"double free within one call: {_some(pages)}")
        self._stack[top - n : top] = pages
        self._top = top - n

    def _free_few(self, pages: PageIndices) -> None:
        """As ``free``, one by one: what a request has beyond its last whole page is a page or two, and each call of NumPy costs
        as much as looking at one of them."""
        top = self._top
        mark, stack = self._mark, self._stack
        for freed, page in enumerate(reversed(pages.tolist()), start=1):
            if 0 <= page < self._total and freed <= top and mark[page] == _NOT_FREE:
                mark[page] = top - freed + 1
                stack[top - freed] = page
                continue
            mark[stack[top - freed + 1 : top]] = _NOT_FREE
            what = (
                f"double free of page {page}"
                if 0 <= page < self._total
                else f"page {page} is outside the pool"
            )
            raise InternalError(f"{what}, of {_some(pages)} that come back to {self!r}")
        self._top = top - len(pages)

    def listing(self) -> PageIndices:
        """A copy of the free pages, next to be given last. O(free pages)."""
        return self._stack[self._top :][::-1].copy()

    def check_invariants(self, owners: Mapping[str, PageIndices] | None = None) -> None:
        """Recompute the free set from nothing; raises InvariantError. O(total_pages).

        Args:
            owners: everybody who owns pages, by name. When given, their pages and the free ones must together be the
                whole pool, each page exactly once.
        """
        free = self._stack[self._top :]
        marked = np.flatnonzero(self._mark != _NOT_FREE)
        if not np.array_equal(np.sort(free), marked):
            raise InvariantError(f"pages: the free stack and the marks differ in {self!r}")
        if not np.array_equal(self._mark[free], self._places[self._top :]):
            raise InvariantError(f"pages: a free page's mark is not its place in {self!r}")
        if owners is None:
            return
        owned = np.zeros(self._total, dtype=np.int64)
        for pages in ({"free": free} | dict(owners)).values():
            np.add.at(owned, pages, 1)
        if (owned != 1).any():
            state = {name: pages.tolist() for name, pages in owners.items()}
            raise InvariantError(
                f"pages: owned by nobody {_some(np.flatnonzero(owned == 0))}, by several {_some(np.flatnonzero(owned > 1))}; "
                f"free {free.tolist()}, owners {state}"
            )

    def __repr__(self) -> str:
        return f"PageAllocator(free={self.free_pages}/{self._total})"


def _some(pages: np.typing.NDArray[np.integer]) -> list[int]:
    """The first few of ``pages``, for a message of bounded length."""
    return [int(page) for page in pages[:8]]
