"""Who shares how much with whom: requests sorted by where their KV lives and by tokens, beside what the cache is thought to hold of each. Pure.

In sorted order, what a request shares with others falls from its neighbours outwards, so all that share more than so many
tokens with it stand together::

    row   tokens              shares with the row before
    0     1 2 3 4 5           0
    1     1 2 3 7             3
    2     1 2 8 8 8           2        rows 0 to 2 share 2 tokens, rows 0 and 1 share 3
    3     9 9                 0

So what one request's prefill adds to the cache, or a look at one request finds gone, is known of all its relatives at once and
without asking the cache. Every request that waits or prefills has a row. The columns are arrays: a question about thousands of
rows is a few operations of numpy. Lengths are in tokens; what can be shared is cut to whole pages.
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixmesh.worker.request import Request

_Rows = npt.NDArray[np.int64]

FIRST_ROWS: Final = 64
"""Room to begin with; it doubles."""

HEAD_TOKENS: Final = 16
"""Two prompts that differ mostly do so early: their first tokens are kept as bytes, which are compared at once."""


_NEVER: Final = sys.maxsize


class Role(IntEnum):
    """What a row's request does."""

    WAITING = 0
    RESUMING = 1
    PREFILLING = 2


class _Relatives(NamedTuple):
    rows: _Rows
    shared: _Rows
    """Tokens that each has in common with the one they are relatives of."""


class PromptOrder:
    """The rows. Every method is O(rows) at numpy's speed, and O(length log rows) where a request's place is looked up."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._requests: list[Request] = []
        self._heads: list[bytes] = []
        """Each row's root and first tokens, in an order that is the rows'."""

        self._columns = np.zeros((6, FIRST_ROWS), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, role: Role, line: int, cached_tokens: int) -> None:
        """Give a request its row. ``line`` is whom it competes with, ``cached_tokens`` what the cache holds of it now."""
        head = _head(request)
        row, before, after = self._place(request, head)
        size = len(self._requests)
        if size == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._requests.insert(row, request)
        self._heads.insert(row, head)
        self._columns[:, row + 1 : size + 1] = self._columns[:, row:size]
        limit = (request.length - 1) // self._page_size * self._page_size
        self._columns[:, row] = (request.number, before, cached_tokens, limit, line, role)
        if row < size:
            self.common[row + 1] = after

    def remove(self, request: Request) -> None:
        """Take a request's row out; nothing when it has none."""
        row = self._row_of(request)
        if row is None:
            return
        size = len(self._requests)
        if row + 1 < size:  # what the rows on both sides share is what both share with this one
            self.common[row + 1] = min(self.common[row], self.common[row + 1])
        del self._requests[row], self._heads[row]
        self._columns[:, row : size - 1] = self._columns[:, row + 1 : size]

    def set_role(self, request: Request, role: Role) -> None:
        """The request does something else now, with the same tokens."""
        row = self._row_of(request)
        if row is not None:
            self.roles[row] = role

    def cached_tokens(self, request: Request) -> int:
        """What the cache is thought to hold of ``request``, which has a row."""
        return int(self.cached[self.row_of(request)])

    def request_at(self, row: int) -> Request:
        """Whose row it is."""
        return self._requests[row]

    def row_of(self, request: Request) -> int:
        """A request's row until the next ``add`` or ``remove``; raises KeyError when it has none."""
        row = self._row_of(request)
        if row is None:
            raise KeyError(request.request_id)
        return row

    @property
    def numbers(self) -> _Rows:
        """Each row's place in the order of arrival."""
        return self._column(0)

    @property
    def common(self) -> _Rows:
        """Tokens that each row shares with the row before it, as ``shared_tokens`` counts them."""
        return self._column(1)

    @property
    def cached(self) -> _Rows:
        """What the cache is thought to hold of each. Too little only if something came to the cache that nobody told of, too
        much when something was evicted since."""
        return self._column(2)

    @property
    def limits(self) -> _Rows:
        """Most tokens of each that a match can give: whole pages, and never the last token."""
        return self._column(3)

    @property
    def lines(self) -> _Rows:
        """Whom each competes with."""
        return self._column(4)

    @property
    def roles(self) -> _Rows:
        """A ``Role`` each."""
        return self._column(5)

    def found(self, row: int, cached_tokens: int) -> None:
        """A look into the cache found so much of ``row``; its relatives learn from it what they can."""
        self.cached[row] = cached_tokens
        near = self._relatives(row, row + 1, self.common[row], self._common_after(row), 0)
        self._raise(near, cached_tokens)
        if cached_tokens < self.limits[row]:  # so the cache goes no further, for nobody who goes on alike
            alike = near.rows[self._whole(near.shared) > cached_tokens]
            self.cached[alike] = cached_tokens

    def offered(self, request: Request, begin: int, end: int) -> None:
        """Tokens ``begin`` to ``end`` of ``request`` are cached now, as those before them were: its relatives find them."""
        row = self._row_of(request)
        if row is not None:
            near = self._relatives(row, row + 1, self.common[row], self._common_after(row), begin)
        else:
            row, before, after = self._place(request, _head(request))
            near = self._relatives(row, row, before, after, begin)
        self._raise(near, end)

    def forget_cached(self) -> None:
        """The cache is empty."""
        self.cached[:] = 0

    def held(self, holders: Iterable[Request], min_tokens: int) -> npt.NDArray[np.bool_]:
        """For each row, whether it pays to wait for what one of ``holders`` is computing: at least ``min_tokens`` of it, or all
        that the row's request could find at all. O(holders), and O(rows) for each that has relatives."""
        held = np.zeros(len(self._requests), dtype=np.bool_)
        for holder in holders:
            self._add_held(held, holder, min_tokens)
        return held

    def _add_held(self, held: npt.NDArray[np.bool_], holder: Request, min_tokens: int) -> None:
        row = self._row_of(holder)
        if row is None:
            return
        offered = holder.shared_pages * self._page_size
        near = self._relatives(row, row + 1, self.common[row], self._common_after(row), offered)
        if not len(near.rows):
            return
        limits = self.limits[near.rows]
        promised = np.minimum(self._whole(near.shared), limits)
        # What is loading for one would be loaded for each of the others as well: that the host has it is no reason to go ahead.
        found = offered if holder.load is not None else np.maximum(self.cached[near.rows], offered)
        gain = promised - found
        pays = (gain >= min_tokens) | ((gain > 0) & (promised == limits))
        held[near.rows[pays & (self.roles[near.rows] != Role.PREFILLING)]] = True

    def _relatives(self, before: int, after: int, left: int, right: int, floor: int) -> _Relatives:
        """Rows below ``before`` and from ``after`` on that share more than ``floor`` tokens with whoever stands between, who shares
        ``left`` with the last of those and ``right`` with the first of these; nearest first on either side."""
        size, common = len(self._requests), self.common
        begin, end = before, after
        if left > floor and before:
            less = np.flatnonzero(common[1:before] <= floor)
            begin = int(less[-1]) + 1 if len(less) else 0
        if right > floor and after < size:
            less = np.flatnonzero(common[after + 1 : size] <= floor)
            end = after + 1 + int(less[0]) if len(less) else size
        lower = _falling(left, common[begin + 1 : before][::-1], before - begin)
        upper = _falling(right, common[after + 1 : end], end - after)
        rows = np.concatenate([np.arange(before - 1, begin - 1, -1), np.arange(after, end)])
        return _Relatives(rows, np.concatenate([lower, upper]))

    def _raise(self, near: _Relatives, cached_tokens: int) -> None:
        at_least = np.minimum(self._whole(np.minimum(near.shared, cached_tokens)), self.limits[near.rows])
        self.cached[near.rows] = np.maximum(self.cached[near.rows], at_least)

    def _whole(self, size_tokens: _Rows) -> _Rows:
        return size_tokens // self._page_size * self._page_size

    def _common_after(self, row: int) -> int:
        return int(self.common[row + 1]) if row + 1 < len(self._requests) else 0

    def _column(self, index: int) -> _Rows:
        return self._columns[index, : len(self._requests)]

    def _row_of(self, request: Request) -> int | None:
        if not self._requests:
            return None
        row = int((self.numbers == request.number).argmax())
        return row if self._requests[row] is request else None

    def _place(self, request: Request, head: bytes) -> tuple[int, int, int]:
        """The row that ``request`` belongs before, and what it shares with the row before that and with that row."""
        requests = self._requests
        low = bisect_left(self._heads, head)
        high = bisect_right(self._heads, head, low)
        while low < high:  # all of these begin alike
            middle = (low + high) // 2
            if _is_later(request, requests[middle]):
                low = middle + 1
            else:
                high = middle
        before = shared_tokens(request, requests[low - 1]) if low else 0
        return low, before, shared_tokens(request, requests[low]) if low < len(requests) else 0


def shared_tokens(one: Request, other: Request) -> int:
    """Length of the common prefix of two requests' known tokens; 0 across namespaces, and behind a public prefix only as far as both stay
    in one. O(length)."""
    if one.root != other.root:
        return 0
    size = min(one.length, other.length, _parting(one, other))
    differs = one.ids[:size] != other.ids[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


def _falling(nearest: int, steps: _Rows, size: int) -> _Rows:
    """What is shared with the nearest relative, and with each further one, given what neighbours share; ``size`` of them."""
    shared = np.full(size, nearest, dtype=np.int64)
    if size > 1:
        np.minimum.accumulate(np.minimum(steps, nearest), out=shared[1:])
    return shared


def _parting(one: Request, other: Request) -> int:
    """Tokens after which two requests of one root live in different namespaces, whatever their tokens are."""
    mine, theirs = one.boundary_tokens or _NEVER, other.boundary_tokens or _NEVER
    if mine == theirs and one.tail == other.tail:
        return _NEVER
    return min(mine, theirs)


def _is_later(one: Request, other: Request) -> bool:
    """Whether ``one`` comes after ``other``, which is of the same root. Where they part, whoever leaves for a tail comes first."""
    shared = shared_tokens(one, other)
    if shared == one.length or shared == other.length:
        return one.length > other.length
    if shared == _parting(one, other):
        return _way_on(one, shared) > _way_on(other, shared)
    return bool(one.ids[shared] > other.ids[shared])


def _way_on(request: Request, parting: int) -> tuple[bool, bytes]:
    return (False, request.tail) if request.boundary_tokens == parting else (True, b"")


def _head(request: Request) -> bytes:
    """Big-endian, so that the order of bytes is that of tokens. It ends before a tail begins."""
    size = min(HEAD_TOKENS, request.length, request.boundary_tokens or HEAD_TOKENS)
    return request.root + request.ids[:size].astype(">i4").tobytes()
