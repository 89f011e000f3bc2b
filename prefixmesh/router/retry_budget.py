"""How much a router may try again: so little that a fleet in trouble is not flooded, and always a little. Pure.

Two bounds, both a share of what callers ask for, with a floor for routers that have little to do:

    at once      attempts beyond a request's first that have no token yet, of the requests that are under way (Envoy's retry budget)
    over time    attempts after a refusal: every request pays in a share of one, every such attempt takes one out (Finagle's)

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

PAID_IN_PERCENT: Final = 15
"""Of an attempt after a refusal, by every request. With what may be saved, a fleet that refuses 100 requests a second for 20 s is sent at
most 1.2 attempts for each, however many came before that were not refused."""

MOST_SAVED: Final = 50
"""Attempts: what a quiet hour has saved up must not fall upon a fleet in the moment in which it is full."""

EARNED_IN_S: Final = 10.0
"""In so long a budget that is used up earns ``LEAST_RETRIES`` by time alone."""

_ATTEMPT: Final = 100
"""What one takes out: whole numbers, so that many small sums add up."""


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

    def __init__(self, *, share: float = RETRY_SHARE, least: int = LEAST_RETRIES) -> None:
        self._share = share
        self._least = least
        self._active = 0
        self._held = 0
        self._waiting: OrderedDict[RetryPlace, None] = OrderedDict()
        # For attempts after refusals, in hundredths of one; counted up by time since then.
        self._saved = least * _ATTEMPT
        self._earning_since = 0.0

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

    def began(self) -> None:
        """A request came; it is under way until ``ended``."""
        self._active += 1
        self._saved = min(MOST_SAVED * _ATTEMPT, self._saved + PAID_IN_PERCENT)
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
        """Whether one more attempt after a refusal is within the budget; if so, it is taken out. ``now`` is seconds of a clock that never
        goes back."""
        self._earn(now)
        if self._saved < _ATTEMPT:
            return False
        self._saved -= _ATTEMPT
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

    def _earn(self, now: float) -> None:
        """By time, up to the least that is always allowed."""
        least = self._least * _ATTEMPT
        earned = int((now - self._earning_since) / EARNED_IN_S * least)
        if earned:
            self._earning_since = now
            self._saved = max(self._saved, min(least, self._saved + earned))


def _nothing() -> None:
    """Nobody waits for a place that is there at once."""
