"""Which worker failed at which wish, how often in a row, and when it may be asked again. Pure: time is passed in.

The pause doubles from failure to failure up to a longest. It is kept per worker and version: what is wrong may be the worker or the prompt, and
either way every other pair goes on.
"""

from typing import Final, NamedTuple

from prefixmesh.ids import Incarnation
from prefixmesh.router.endpoint import Endpoint

MAX_DOUBLINGS: Final = 16
"""More than any pause has; counts grow without end."""

FORGIVEN_PAUSES: Final = 4
"""Who has not failed for so many of the longest pauses fails for the first time."""

MAX_PROBLEM_CHARS: Final = 200
"""Of what a worker said: an operator's line, not its log."""


class Failure(NamedTuple):
    """The last one of some in a row."""

    times: int
    at: float
    until: float
    """Not to be asked again before."""

    problem: str


class Memory:
    """What the controller remembers of what failed. A worker that would not take a pin is still asked to let go of it."""

    def __init__(self, first_pause_s: float, longest_pause_s: float) -> None:
        self.warms = Failures(first_pause_s, longest_pause_s)
        self.unpins = Failures(first_pause_s, longest_pause_s)
        self.vain = Failures(first_pause_s, longest_pause_s)
        """Each ``Warm`` that went well, until the pin is seen to be held: a worker that says it is done, again and again, and lacks it."""

    def prune(self, lives: dict[Endpoint, Incarnation], now: float) -> None:
        """Forget what is long ago, and lives that are over. O(failures)."""
        for failures in (self.warms, self.unpins, self.vain):
            failures.prune(lives, now)


class Failures:
    """What failed lately. Not thread-safe. Every method is O(1), but ``prune``."""

    def __init__(self, first_pause_s: float, longest_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._last: dict[tuple[Endpoint, Incarnation, str], Failure] = {}

    def __len__(self) -> int:
        return len(self._last)

    def failed(
        self, endpoint: Endpoint, incarnation: Incarnation, pin_id: str, problem: str, now: float
    ) -> None:
        """It did not work, for a reason."""
        key = (endpoint, incarnation, pin_id)
        before = self._last.get(key)
        count = before.times + 1 if before else 1
        pause = self._first_pause_s * 2.0 ** min(count - 1, MAX_DOUBLINGS)
        until = now + min(pause, self._longest_pause_s)
        self._last[key] = Failure(count, now, until, problem[:MAX_PROBLEM_CHARS])

    def succeeded(self, endpoint: Endpoint, incarnation: Incarnation, pin_id: str) -> None:
        """It worked: the next failure is the first."""
        self._last.pop((endpoint, incarnation, pin_id), None)

    def last(self, endpoint: Endpoint, incarnation: Incarnation, pin_id: str) -> Failure | None:
        """The last failure since it worked; None where there was none."""
        return self._last.get((endpoint, incarnation, pin_id))

    def is_paused(self, endpoint: Endpoint, incarnation: Incarnation, pin_id: str, now: float) -> bool:
        """Whether it must not be asked again yet."""
        failure = self._last.get((endpoint, incarnation, pin_id))
        return failure is not None and now < failure.until

    def prune(self, lives: dict[Endpoint, Incarnation], now: float) -> None:
        """Forget what is long ago, and lives that are over. O(failures)."""
        if not self._last:
            return
        oldest = now - FORGIVEN_PAUSES * self._longest_pause_s
        for key in [
            key for key, failure in self._last.items() if failure.at < oldest or lives.get(key[0]) != key[1]
        ]:
            del self._last[key]
