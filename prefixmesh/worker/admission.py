"""Who waits, and who is next: the bounded queue before the batch. Pure.

Two kinds wait: *resuming* requests (preempted; always first, in the order in which they arrived) and those that were never
admitted, in one line, or under ``priority`` in one line for each priority. Of a line

* ``fcfs`` takes the oldest;
* ``lpm`` and ``priority`` take the one with the longest cached prefix, because it costs least and uses the cache while it is
  there; but at most ``max_passed_over`` later arrivals of its line go before anyone (F56).

``priority`` asks the highest line first, and gives every so many admissions one turn to the oldest request of all. Whoever shares
a prefix with a prompt that is being computed is held until it is there; and when its turn has come, those after it wait with it.
"""

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from prefixmesh.config import SchedulePolicy
from prefixmesh.worker.prompt_order import PromptOrder, Role
from prefixmesh.worker.queue_deadlines import QueueDeadlines
from prefixmesh.worker.queue_pace import QueuePace
from prefixmesh.worker.request import Phase, Request
from prefixmesh.worker.waiting_line import WaitingLine
from prefixmesh.worker.waiting_ranks import WaitingRanks

ONE_LINE: Final = 0

MAX_LOOKS: Final = 16
"""Looks into the cache for one choice. What is thought to be cached is mostly right, and each look that finds less corrects all
who share it; after so many the best guess is taken, for a step must not wait for a whole queue of looks."""

MAX_SKIPPED: Final = 8
"""Candidates of one step that cannot start now and are left aside for others behind them."""


class AdmissionQueue:
    """The bounded waiting queue."""

    def __init__(
        self,
        policy: SchedulePolicy,
        *,
        max_queued: int,
        max_passed_over: int,
        page_size: int,
        peek: Callable[[Request], int],
        expect_s: Callable[[Request, int], float] = lambda request, cached_tokens: 0.0,
    ) -> None:
        """``peek`` tells how many tokens of a request are cached now, ``expect_s`` how many seconds it takes at least from its admission to
        its end where so many are."""
        self.policy: SchedulePolicy = policy
        self.max_passed_over = max_passed_over
        self.peek = peek
        self.order = PromptOrder(page_size)
        self.lines: dict[int, WaitingLine] = {}
        """By priority under ``priority``, else one; none is empty."""

        self.resuming: dict[int, Request] = {}
        self._max_queued = max_queued
        self._expect_s = expect_s
        self._waiting: dict[int, Request] = {}
        self._ranks = WaitingRanks()
        self._pace = QueuePace()
        self._deadlines = QueueDeadlines()
        self._arrivals = 0
        self._turn = 0
        """Admissions since the oldest of all became that."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self.resuming)

    @property
    def full(self) -> bool:
        """Whether one more is one too many. The preempted do not count: they were admitted once."""
        return len(self._waiting) >= self._max_queued

    @property
    def oldest(self) -> Request:
        """Of those that were never admitted. Raises StopIteration when there is none."""
        return next(iter(self._waiting.values()))

    @property
    def is_oldests_turn(self) -> bool:
        """Whether the oldest of all goes next, whatever is cached and whoever matters more."""
        return self.policy == "fcfs" or (self.policy == "priority" and self._turn >= self.max_passed_over)

    def add(self, request: Request) -> None:
        """Queue a new request behind all others. One look into the cache, and O(length log queue)."""
        self._arrivals += 1
        request.number = self._arrivals
        self._waiting[request.number] = request
        line, cached_tokens = self._line_of(request), self.peek(request)
        self.lines.setdefault(line, WaitingLine()).add(request)
        self.order.add(request, Role.WAITING, line, cached_tokens)
        self._ranks.add(request)
        request.latest_begin = request.due_at - self._expect_s(request, cached_tokens)
        self._deadlines.add(request)
        self._deadlines.forget_others(len(self._waiting))

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all that were never admitted."""
        request.phase = Phase.PREEMPTED
        self.resuming[request.number] = request
        self.order.remove(request)  # it may have been prefilling
        self.order.add(request, Role.RESUMING, self._line_of(request), self.peek(request))

    def admitted(self, request: Request) -> None:
        """A request begins to prefill: those that arrived before it were passed over, and its relatives may wait for it."""
        self.order.set_role(request, Role.PREFILLING)
        if self.resuming.pop(request.number, None) is None:
            self._leave(request, admitted=True)

    def remove(self, request: Request) -> None:
        """Forget a request that waits or prefills; nothing when it does neither."""
        self.order.remove(request)
        if self.resuming.pop(request.number, None) is None and request.number in self._waiting:
            self._leave(request, admitted=False)

    def take_expired(self, now: float) -> list[Request]:
        """Those that have waited as long as they may, or can, still queued. O(expired log queue)."""
        return self._deadlines.take_expired(now)

    def gives_way_to(self, priority: int) -> Request | None:
        """Who leaves a full queue for a newcomer of ``priority``, still queued; None when nobody does. O(different priorities)."""
        return self._ranks.last_below(priority)

    def moved_on(self, admitted: int, now: float) -> None:
        """A step admitted so many."""
        self._pace.admitted(admitted, now)
        if not self._waiting:
            self._pace.idle()

    def retry_after_s(self, now: float) -> float | None:
        """When somebody who finds the queue full may come back; None where it has not been seen to move. O(1)."""
        return self._pace.retry_after_s(self._max_queued, now)

    def open_round(self, holders: Iterable[Request], hold_min_tokens: int | None) -> "AdmissionRound":
        """The candidates of one step; ``holders`` prefill and will offer what they compute. Without ``hold_min_tokens`` nobody is
        held. O(queue) at numpy's speed."""
        return AdmissionRound(self, holders, hold_min_tokens)

    @property
    def uncached_tokens(self) -> int:
        """Tokens that those who wait will have to compute, as far as is known: whole pages, and the token that always is. O(rows)."""
        order = self.order
        waiting = order.roles != Role.PREFILLING
        missing = np.maximum(order.limits - order.cached, 0) + 1
        return int(missing[waiting].sum())

    @property
    def uncached_squares(self) -> int:
        """Of those tokens, the sum of ``b**2 - a**2`` over requests that have the ones from ``a`` to ``b`` to compute. O(rows)."""
        order = self.order
        waiting = order.roles != Role.PREFILLING
        ends = order.limits + 1
        begins = np.minimum(order.cached, order.limits)
        return int((ends**2 - begins**2)[waiting].sum())

    def check_bounds(self) -> bool:
        """Whether the queue is within its bound and all its books agree. O(queue)."""
        in_lines = sum(len(line) for line in self.lines.values())
        rows = int((self.order.roles != Role.PREFILLING).sum())
        return (
            len(self._waiting) <= self._max_queued
            and len(self._waiting) == in_lines
            and rows == len(self)
            and all(line.passed_over <= self.max_passed_over for line in self.lines.values())
            and len(self._ranks) == sum(request.may_give_way for request in self._waiting.values())
        )

    def requests(self) -> list[Request]:
        """All of them, resuming first."""
        return [*self.resuming.values(), *self._waiting.values()]

    def _line_of(self, request: Request) -> int:
        return request.priority if self.policy == "priority" else ONE_LINE

    def _leave(self, request: Request, *, admitted: bool) -> None:
        if request is self.oldest:
            self._turn = 0
        elif admitted:
            self._turn += 1
        del self._waiting[request.number]
        self._ranks.remove(request)
        name = self._line_of(request)
        line = self.lines[name]
        line.remove(request, admitted=admitted)
        if not len(line):
            del self.lines[name]


class AdmissionRound:
    """One step's choices. Between two of them nothing may leave the queue but what was admitted."""

    def __init__(
        self, queue: AdmissionQueue, holders: Iterable[Request], hold_min_tokens: int | None
    ) -> None:
        self._queue = queue
        self._holders = list(holders)
        self._hold_min = hold_min_tokens
        self._held = np.zeros(len(queue.order), dtype=np.bool_)
        self._open = queue.order.roles == Role.WAITING
        """Rows that may still be chosen by what is cached of them."""

        self._hold_for(self._holders)
        self._skips = 0
        self._none_before = False
        """Whether nobody may go before the candidate that was picked last."""

    def pick(self) -> Request | None:
        """The next candidate; None when nobody is left who may start now. It changes nothing but what is known of the cache."""
        queue = self._queue
        self._none_before = True
        if queue.resuming:
            return self._first_free(queue.resuming[number] for number in sorted(queue.resuming))
        if not queue.lines:
            return None
        if queue.is_oldests_turn:
            return self._first_free([queue.oldest])
        for name in sorted(queue.lines, reverse=True):
            line = queue.lines[name]
            self._none_before = line.passed_over >= queue.max_passed_over
            found = self._first_free([line.oldest]) if self._none_before else self._longest_cached(name)
            if found is not None:
                return found
        return None

    def skip(self, request: Request, *, too_long: bool) -> bool:
        """Leave a candidate aside that cannot start now, and with ``too_long`` all that have as much to compute; False when nobody
        may go before it."""
        self._skips += 1
        if self._none_before or self._skips > MAX_SKIPPED:
            return False
        order = self._queue.order
        row = order.row_of(request)
        self._open[row] = False
        # Those of lower priority do not take the room that it waits for.
        self._open &= order.lines >= order.lines[row]
        if too_long:
            missing = order.limits - order.cached
            self._open &= missing < missing[row]
        return True

    def set_aside(self, request: Request) -> None:
        """``request`` waits for something else than room: others go before it, as they do before whoever waits for a relative."""
        row = self._queue.order.row_of(request)
        self._held[row] = True
        self._open[row] = False

    def took(self, request: Request) -> None:
        """``request`` was admitted: its relatives may wait for it now."""
        order = self._queue.order
        self._open[order.row_of(request)] = False
        self._queue.admitted(request)
        self._holders.append(request)
        self._hold_for([request])

    def _hold_for(self, holders: Iterable[Request]) -> None:
        if self._hold_min is not None:
            held = self._queue.order.held(holders, self._hold_min)
            self._held |= held
            self._open &= ~held

    def _look(self, row: int) -> bool:
        """Look into the cache for one candidate; returns whether what was thought of it was right."""
        order = self._queue.order
        cached = self._queue.peek(order.request_at(row))
        if cached == order.cached[row]:
            return True
        order.found(row, cached)
        self._hold_for(self._holders)  # who has less than was thought may gain more by waiting
        return False

    def _first_free(self, requests: Iterable[Request]) -> Request | None:
        """The first that is not held."""
        for request in requests:
            row = self._queue.order.row_of(request)
            if not self._held[row]:
                self._look(row)
                if not self._held[row]:
                    return request
        return None

    def _longest_cached(self, line: int) -> Request | None:
        order = self._queue.order
        is_open = self._open if len(self._queue.lines) == 1 else self._open & (order.lines == line)
        row = _best_row(order, is_open)
        for _ in range(MAX_LOOKS):
            if row is None or self._look(row):
                break
            row = _best_row(order, is_open & self._open)
        return None if row is None else order.request_at(row)


def _best_row(order: PromptOrder, is_open: npt.NDArray[np.bool_]) -> int | None:
    """The longest cached, and of several the oldest."""
    lengths = np.where(is_open, order.cached, -1)
    longest = lengths.max()
    if longest < 0:
        return None
    best = np.flatnonzero(lengths == longest)
    return int(best[order.numbers[best].argmin()])
