"""When each request of a replay comes: at its time, after the one before it, or when a place is free. Pure but for the clock.

A *conversation* is a request that comes after no other and all that come after it. In the open loop it begins when the workload says; in the
closed loop so many are under way at a time, whatever the workload's times are, and the next begins when one has ended: what a fleet can do,
and not what it is asked to.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from prefixmesh.sim.workload import WorkloadRequest

RAMP_S: Final = 10.0
"""The first conversations of a closed loop come one after the other over so long: nobody opens 512 in one moment."""

_MS_PER_S: Final = 1e3


class Clock(Protocol):
    """A simulation's, or an event loop's where a real cluster is asked."""

    @property
    def now(self) -> float:
        """Seconds."""
        ...

    def call_at(self, when: float, call: Callable[[], Any]) -> object:
        """Call at a time; one that is past is now."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], Any]) -> object:
        """Call after a delay; 0 is after all that is due now."""
        ...


class Arrivals:
    """Calls ``arrive`` with the number of each request when it comes. ``concurrency``: 0 is the open loop."""

    def __init__(
        self,
        sim: Clock,
        requests: Sequence[WorkloadRequest],
        arrive: Callable[[int], None],
        *,
        speed: float = 1.0,
        concurrency: int = 0,
    ) -> None:
        self._sim = sim
        self._requests = requests
        self._arrive = arrive
        self._speed = speed
        self._followers = _followers(requests)
        firsts = [number for number, one in enumerate(requests) if one.arrival_ms is not None]
        self._firsts = array("q", sorted(firsts, key=self._arrival_ms))
        self._next = 0
        self._is_closed = concurrency > 0
        self._conversation, self._open = _conversations(requests) if concurrency else (array("q"), array("q"))
        if concurrency:
            places = min(concurrency, len(self._firsts))
            for place in range(places):
                sim.call_at(RAMP_S * place / places, self._begin_next)
        else:
            sim.call_later(0.0, self._come_in_time)

    def ended(self, number: int) -> None:
        """A request has its answer. O(those that come after it)."""
        for follower in self._followers.get(number, ()):
            pause_s = self._requests[follower].pause_ms / _MS_PER_S
            self._sim.call_later(pause_s, partial(self._arrive, follower))
        if self._is_closed:
            conversation = self._conversation[number]
            self._open[conversation] -= 1
            if not self._open[conversation]:
                self._sim.call_later(0.0, self._begin_next)

    def _arrival_ms(self, number: int) -> int:
        arrival_ms = self._requests[number].arrival_ms
        assert arrival_ms is not None, "comes after no other"
        return arrival_ms

    def _begin_next(self) -> None:
        if self._next < len(self._firsts):
            number = self._firsts[self._next]
            self._next += 1
            self._arrive(number)

    def _come_in_time(self) -> None:
        """All that are due come, and the next is waited for: one call at a time, however many there are."""
        while self._next < len(self._firsts):
            when = self._arrival_ms(self._firsts[self._next]) / _MS_PER_S / self._speed
            if when > self._sim.now:
                self._sim.call_at(when, self._come_in_time)
                return
            self._begin_next()


def _followers(requests: Sequence[WorkloadRequest]) -> Mapping[int, Sequence[int]]:
    """By a request's number, those that come after its end."""
    followers: dict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        if request.after is not None:
            followers[request.after].append(number)
    return followers


def _conversations(requests: Sequence[WorkloadRequest]) -> tuple["array[int]", "array[int]"]:
    """Of each request the first of its conversation, and of each first how many there are in it."""
    first_of, sizes = array("q"), array("q", bytes(8 * len(requests)))
    for number, request in enumerate(requests):
        first = number if request.after is None else first_of[request.after]
        first_of.append(first)
        sizes[first] += 1
    return first_of, sizes
