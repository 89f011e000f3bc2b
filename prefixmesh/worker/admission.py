"""Who waits, and who is next: the bounded queue before the batch. Pure.

Two lines: *resuming* requests (preempted; always first, in the order in which they arrived) and *waiting* ones. Among the
waiting, ``fcfs`` takes the oldest; ``lpm`` the one with the longest cached prefix, because it costs least and uses the cache
while it is there. Under ``lpm`` nobody is passed over more than ``MAX_PASSED_OVER`` times.
"""

import itertools
from collections.abc import Callable
from typing import Final

import numpy as np

from prefixmesh.config import SchedulePolicy
from prefixmesh.worker.request import Request

MAX_PASSED_OVER: Final = 32
"""A request that this many later arrivals overtook goes next whatever is cached (F56). Large enough that a burst with one
shared prefix runs together, small enough that a cold request waits for tens of admissions, not thousands."""

LPM_WINDOW: Final = 64
"""Only the oldest so many are compared: a probe of the cache costs time in the length of the prompt, and every step pays."""

FIRST_LOOK_TOKENS: Final = 32
"""Two prompts that differ mostly do so early: looked at before the whole is compared."""


class AdmissionQueue:
    """The bounded waiting queue. All methods O(1) but ``open_round``."""

    def __init__(self, policy: SchedulePolicy, max_queued: int) -> None:
        self._policy: SchedulePolicy = policy
        self._max_queued = max_queued
        self._waiting: dict[str, Request] = {}
        self._resuming: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._resuming)

    @property
    def full(self) -> bool:
        """Whether one more is one too many. The preempted do not count: they were admitted once."""
        return len(self._waiting) >= self._max_queued

    def add(self, request: Request) -> None:
        """Queue a new request behind all others."""
        self._waiting[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all that were never admitted."""
        self._resuming[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take a request out, admitted or aborted."""
        self._waiting.pop(request.request_id, None)
        self._resuming.pop(request.request_id, None)

    def open_round(self, peek: Callable[[Request], int]) -> "AdmissionRound":
        """The candidates of one step. O(window), and one probe of the cache for each under ``lpm``."""
        resuming = sorted(self._resuming.values(), key=lambda request: request.arrived_at)
        window = list(itertools.islice(self._waiting.values(), LPM_WINDOW))
        return AdmissionRound(self._policy, resuming, window, peek)

    def check_bounds(self) -> bool:
        """Whether the queue is within its bound."""
        return len(self._waiting) <= self._max_queued

    def requests(self) -> list[Request]:
        """All of them, resuming first."""
        return [*self._resuming.values(), *self._waiting.values()]


class AdmissionRound:
    """One step's order of admission; lengths found in the cache are asked once."""

    def __init__(
        self,
        policy: SchedulePolicy,
        resuming: list[Request],
        window: list[Request],
        peek: Callable[[Request], int],
    ) -> None:
        self._policy = policy
        self._resuming = resuming
        self._window = window
        self._peek = peek
        self._cached: dict[str, int] = {}

    def pick(self, is_held: Callable[[Request, int], bool]) -> Request | None:
        """The next candidate; None when nobody is left who may start now.

        ``is_held(request, cached_tokens)`` says that it pays to wait for a prefix that another is computing. Under ``fcfs``
        a held request holds those behind it too; one that was passed over too often is not held any longer.
        """
        if self._resuming:
            return self._resuming[0]
        for request in self._window:
            if request.passed_over >= MAX_PASSED_OVER:
                return request
        if self._policy == "fcfs":
            first = self._window[0] if self._window else None
            return None if first is None or is_held(first, 0) else first
        best: Request | None = None
        longest = -1
        for request in self._window:
            cached = self._cached_tokens(request)
            if cached > longest and not is_held(request, cached):
                best, longest = request, cached
        return best

    def took(self, request: Request) -> None:
        """Record that ``request`` was admitted: those that arrived before it were passed over."""
        if request in self._resuming:
            self._resuming.remove(request)
            return
        for older in self._window:
            if older is request:
                break
            older.passed_over += 1
        self._window.remove(request)

    def _cached_tokens(self, request: Request) -> int:
        found = self._cached.get(request.request_id)
        if found is None:
            found = self._cached[request.request_id] = self._peek(request)
        return found


def shared_tokens(one: Request, other: Request) -> int:
    """Length of the common prefix of two requests' known tokens; 0 across namespaces. O(length), O(1) for most that differ."""
    if one.namespace != other.namespace:
        return 0
    size = min(one.length, other.length)
    start = min(size, FIRST_LOOK_TOKENS)
    if not np.array_equal(one.ids[:start], other.ids[:start]):
        return _first_difference(one, other, start)
    return _first_difference(one, other, size)


def _first_difference(one: Request, other: Request, size: int) -> int:
    differing = np.flatnonzero(one.ids[:size] != other.ids[:size])
    return int(differing[0]) if len(differing) else size
