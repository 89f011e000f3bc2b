"""How a caller gets over the restart of its router: how long it waits, and when it gives up. Pure.

A router that dies is back within seconds: its supervisor starts another at the same address. So a call that finds it gone is sent again after
a pause, and after longer ones, each drawn anew so that many callers do not come back at once (exponential backoff with jitter: M. Brooker,
"Exponential Backoff And Jitter", AWS 2015). It is for a router that has answered this client before: an address at which nobody ever was is a
mistake, and is told at once.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prefixmesh.errors import PrefixmeshError, StoppingError, UnavailableError

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
"""Twice that, at most, after a router is back, its callers are."""

PATIENCE_S: Final = 30.0
"""How long a call without a deadline waits for its router; one with a deadline waits until then. A supervisor's first restarts take seconds."""

MAX_ROUTER_DEATHS: Final = 4
"""Routers that may die with a call in them before it gets a token: one that kills its routers must not go on doing so."""


class Failure(enum.Enum):
    """What a failed call says of the server that it went to."""

    CALLERS = "callers"
    """It has answered, and would say the same again: the caller is told."""

    REFUSED = "refused"
    """It lives and does not take this request now."""

    UNREACHED = "unreached"
    """Nothing was sent: no connection came about, or somebody else answers there."""

    DIED = "died"
    """The connection broke, or the answer ended without its end."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A call that failed: what its caller would be told, and what it means."""

    error: PrefixmeshError
    failure: Failure


def silent(worker: str, idle_s: float) -> Broken:
    """A worker that began to answer has said nothing for so long, though its connection stands: it has lost the request."""
    return Broken(UnavailableError(f"{worker} has said nothing for {idle_s:g} s"), Failure.DIED)


class RouterMemory:
    """Whether this client's router has ever answered it."""

    def __init__(self) -> None:
        self.has_answered = False


class Ride:
    """One call's patience with its router. ``broke`` after a call to it that failed, ``answered`` when it has answered anything."""

    def __init__(
        self, memory: RouterMemory, *, rides: bool, draw: Callable[[], float], patience_s: float = PATIENCE_S
    ) -> None:
        """Without ``rides`` every failure is told at once. ``draw`` gives numbers from 0 up to 1; ``patience_s`` is for calls without a deadline."""
        self._memory = memory
        self._rides = rides
        self._draw = draw
        self._patience_s = patience_s
        self._gone_since_s: float | None = None
        self._pauses = self._deaths = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the router is gone, as far as this call knows."""
        return self._gone_since_s is not None

    def answered(self) -> None:
        """The router is there."""
        self._memory.has_answered = True
        self._gone_since_s, self._pauses = None, 0

    def progressed(self) -> None:
        """A token has come."""
        self._deaths = 0

    def broke(self, broken: Broken, now_s: float, left_s: float | None) -> float:
        """Seconds to wait before the call is sent again; ``left_s`` is what is left of its time. Raises the error that it ends with."""
        if broken.failure is Failure.DIED:
            self._memory.has_answered = True
            self._deaths += 1
        self._memory.has_answered |= broken.failure is Failure.REFUSED
        may_wait = self._rides and self._memory.has_answered and self._deaths <= MAX_ROUTER_DEATHS
        if not may_wait or not self._is_gone(broken):
            raise broken.error
        began_s = self._gone_since_s = now_s if self._gone_since_s is None else self._gone_since_s
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._pauses) * (0.5 + self._draw())
        self._pauses += 1
        if pause_s >= (self._patience_s - (now_s - began_s) if left_s is None else left_s):
            raise UnavailableError(
                f"{broken.error} (waited {now_s - began_s:.1f} s for it)"
            ) from broken.error
        return pause_s

    def _is_gone(self, broken: Broken) -> bool:
        if broken.failure is Failure.REFUSED:
            # One that leaves is followed by another, and that one may know no worker yet. At any other time that is its answer.
            stops = isinstance(broken.error, StoppingError)
            return stops or (self.is_waiting and isinstance(broken.error, UnavailableError))
        return broken.failure is not Failure.CALLERS
