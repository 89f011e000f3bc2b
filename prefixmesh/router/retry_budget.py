"""How much a router may try again: so little that a fleet in trouble is not flooded, and always a little. Pure.

Two bounds, both a share of what callers ask for, with a floor for routers that have little to do:

    at once      attempts beyond a request's first that have no token yet, of the requests that are under way (Envoy's retry budget)
    over time    attempts after a refusal, of the requests of the last seconds (Finagle's)

Who finds the first used up may wait in order for a place: a worker that died with a third of all requests has them taken up again bit by
bit. The second is never waited for: a fleet that refuses is full, and a refusal at once is the better answer. What is tried again, and
after what, is ``attempts``' business.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from prefixmesh.errors import DoubleReleaseError

RETRY_SHARE: Final = 0.2
"""Of all work at most a sixth is done for attempts beyond the first."""

LEAST_RETRIES: Final = 3
"""A router with a request or two under way may still try them again."""

WINDOW_S: Final = 10.0
"""So far back what was asked and refused is counted: long beside a burst, short beside an outage."""

BUCKETS: Final = 10
"""What is counted leaves the window in so many steps."""


class RetryPlace:
    """One attempt's place among those that are tried again at once: waited for or held, and left once."""

    __slots__ = ("_budget", "_on_held", "has_left", "is_held")

    def __init__(self, budget: "RetryBudget", on_held: Callable[[], object]) -> None:
        self._budget = budget
        self._on_held = on_held
        self.is_held = False
        self.has_left = False

    def leave(self) -> None:
        """Give it back, or wait for it no longer; whoever waits longest gets it. O(1). Raises DoubleReleaseError the second time."""
        if self.has_left:
            raise DoubleReleaseError("a retry's place was left twice")
        self.has_left = True
        self._budget._left(self)

    def hold(self) -> None:
        """It is given; who waited is told."""
        self.is_held = True
        self._on_held()


class RetryBudget:
    """Counts the requests and the retries of one router. Not thread-safe; every method is O(1) but for whom it lets go on."""

    def __init__(
        self, *, share: float = RETRY_SHARE, least: int = LEAST_RETRIES, window_s: float = WINDOW_S
    ) -> None:
        self._share = share
        self._least = least
        self._bucket_s = window_s / BUCKETS
        self._active = 0
        self._held = 0
        self._waiting: OrderedDict[RetryPlace, None] = OrderedDict()
        # Rings over the window's buckets; the newest is the one of ``_newest``, counted in buckets of the clock.
        self._asked = [0] * BUCKETS
        self._retried = [0] * BUCKETS
        self._newest = 0

    def __repr__(self) -> str:
        return f"RetryBudget({self._active} active, {self._held} of {self.places} places held, {len(self._waiting)} waiting)"

    @property
    def active(self) -> int:
        """Requests under way."""
        return self._active

    @property
    def places(self) -> int:
        """Attempts beyond the first that may be without a token at once."""
        return max(self._least, int(self._share * self._active))

    def began(self, now: float) -> None:
        """A request came; it is under way until ``ended``. ``now`` is seconds of a clock that never goes back."""
        self._turn_to(now)
        self._active += 1
        self._asked[self._newest % BUCKETS] += 1
        self._let_on()

    def ended(self) -> None:
        """A request is over; it has left its places before."""
        if not self._active:
            raise DoubleReleaseError("a request ended that had not begun")
        self._active -= 1

    def take_place(self) -> RetryPlace | None:
        """A place at once; None where all are held, or others wait for one already."""
        if self._waiting or self._held >= self.places:
            return None
        place = RetryPlace(self, _nothing)
        self._give(place)
        return place

    def await_place(self, on_held: Callable[[], object]) -> RetryPlace:
        """A place now or later: ``on_held`` is called in the moment in which it is held, which may be before this returns."""
        place = RetryPlace(self, on_held)
        self._waiting[place] = None
        self._let_on()
        return place

    def may_retry_refused(self, now: float) -> bool:
        """Whether one more attempt after a refusal is within the share; if so, it is counted."""
        self._turn_to(now)
        if sum(self._retried) + 1 > max(self._least, self._share * sum(self._asked)):
            return False
        self._retried[self._newest % BUCKETS] += 1
        return True

    def _left(self, place: RetryPlace) -> None:
        if place.is_held:
            self._held -= 1
        else:
            del self._waiting[place]
        self._let_on()

    def _let_on(self) -> None:
        while self._waiting and self._held < self.places:
            place, _ = self._waiting.popitem(last=False)
            self._give(place)

    def _give(self, place: RetryPlace) -> None:
        self._held += 1
        place.hold()

    def _turn_to(self, now: float) -> None:
        bucket = int(now // self._bucket_s)
        for empty in range(max(self._newest + 1, bucket - BUCKETS + 1), bucket + 1):
            self._asked[empty % BUCKETS] = self._retried[empty % BUCKETS] = 0
        self._newest = max(self._newest, bucket)


def _nothing() -> None:
    """Nobody waits for a place that is there at once."""
