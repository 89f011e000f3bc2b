"""What became of each router's requests in this worker, kept until that router's readers have been told. Pure.

A router is known by the name in its tickets. What happens to its requests is a numbered log; a reader of its reports is a place in that
log, so that any number of them, and one that begins anew, cost nothing but their own reading. A reader without a place is told what runs
now, and what ended before as far as the log goes back.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from prefixmesh.errors import OverloadedError
from prefixmesh.ids import RequestId

MAX_KEPT_CHANGES: Final = 8_192
"""Of one router, three a request. A reader is told twenty times a second, so that only one that does not read is left behind."""

MAX_ROUTERS: Final = 128
"""Names that are remembered though nobody of them reads or runs: a router has a new one after each restart."""


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """What a reader has not been told of its router's requests. The lists are to be read in this order."""

    accepted: tuple[str, ...] = ()
    prefilled: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    running: int = 0
    """Requests of the router that are in the worker now."""


class RouterRequests:
    """Requests by router. A router's id is the empty string for those that no router sent: of them nothing is kept."""

    def __init__(self, *, max_kept_changes: int = MAX_KEPT_CHANGES, max_routers: int = MAX_ROUTERS) -> None:
        self._max_kept_changes = max_kept_changes
        self._max_routers = max_routers
        self._logs: OrderedDict[str, _Log] = OrderedDict()

    def __len__(self) -> int:
        """Routers that something is kept of."""
        return len(self._logs)

    def __repr__(self) -> str:
        running = sum(len(log.running) for log in self._logs.values())
        return f"RouterRequests({len(self)} routers, {running} requests)"

    def accepted(self, router_id: str, request_id: RequestId) -> None:
        """A router's request was taken in. O(1), and O(routers) for a router that is new."""
        if router_id:
            self._log(router_id).accept(request_id)

    def prefilled(self, router_id: str, request_id: RequestId) -> None:
        """The first token of a request was computed. Only the first call counts. O(1)."""
        if router_id:
            self._log(router_id).prefill(request_id)

    def ended(self, router_id: str, request_id: RequestId) -> None:
        """A request has ended, however. O(1)."""
        if router_id:
            self._log(router_id).end(request_id)

    @contextmanager
    def follow(self, router_id: str) -> Iterator["OwnReader"]:
        """A reader of one router's requests, which is kept in mind for as long as the block lasts."""
        log = self._log(router_id) if router_id else _Log(0)
        log.readers += 1
        try:
            yield OwnReader(log)
        finally:
            log.readers -= 1

    def _log(self, router_id: str) -> "_Log":
        log = self._logs.get(router_id)
        if log is None:
            if len(self._logs) >= self._max_routers:
                self._forget_one()
            log = self._logs[router_id] = _Log(self._max_kept_changes)
        self._logs.move_to_end(router_id)
        return log

    def _forget_one(self) -> None:
        """Forget the router that was heard of least recently, of those that nobody needs. With all of them in use there are as many as
        readers and requests, which are bounded."""
        idle = (router_id for router_id, log in self._logs.items() if not (log.readers or log.running))
        router_id = next(idle, None)
        if router_id is not None:
            del self._logs[router_id]


class OwnReader:
    """One reader's place in its router's log."""

    def __init__(self, log: "_Log") -> None:
        self._log = log
        self._next: int | None = None

    def take(self) -> OwnRequests:
        """What is new since the last call; at the first, all that runs and what is kept of what ended. O(what is told).

        Raises OverloadedError when that is not kept any more: the reader must begin anew.
        """
        log, place = self._log, self._next
        if place is not None and place < log.first:
            raise OverloadedError(
                "this reader was too slow: what became of its requests is not kept any more"
            )
        self._next = log.first + len(log.changes)
        return log.all_of_it() if place is None else log.since(place)


class _Log:
    """One router's requests and what happened to them."""

    __slots__ = ("changes", "first", "max_kept", "readers", "running")

    def __init__(self, max_kept: int) -> None:
        self.max_kept = max_kept
        self.readers = 0
        self.running: dict[str, bool] = {}
        """Those in the worker, in the order of their coming, and whether the first token of each was computed."""

        self.changes: deque[tuple[int, str]] = deque()
        """Steps of requests: 0 accepted, 1 prefilled, 2 ended."""

        self.first = 0
        """Number of the first change that is kept."""

    def accept(self, request_id: str) -> None:
        self.running[request_id] = False
        self._note(0, request_id)

    def prefill(self, request_id: str) -> None:
        if self.running.get(request_id) is False:
            self.running[request_id] = True
            self._note(1, request_id)

    def end(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self._note(2, request_id)

    def since(self, number: int) -> OwnRequests:
        new = len(self.changes) - (number - self.first)
        # From the end, where what is new lies: a deque is slow in its middle.
        told = [self.changes[-index] for index in range(new, 0, -1)]
        return self._told(told)

    def all_of_it(self) -> OwnRequests:
        runs = [(0, request_id) for request_id in self.running]
        runs += [(1, request_id) for request_id, is_prefilled in self.running.items() if is_prefilled]
        return self._told([*self.changes, *runs])

    def _told(self, changes: list[tuple[int, str]]) -> OwnRequests:
        accepted, prefilled, ended = (
            tuple(dict.fromkeys(request_id for step, request_id in changes if step == wanted))
            for wanted in range(3)
        )
        # An id may come again, as a router's second try: that it ended before must not end it now.
        ended = tuple(request_id for request_id in ended if request_id not in self.running)
        return OwnRequests(accepted, prefilled, ended, len(self.running))

    def _note(self, step: int, request_id: str) -> None:
        self.changes.append((step, request_id))
        if len(self.changes) > self.max_kept:
            self.changes.popleft()
            self.first += 1
