"""Ends a worker's call that has begun to answer and says nothing any more, though its connection stands.

Before the first token silence is no failure: a long prompt takes what it takes, and others may be in front of it. Between tokens a worker
that is well needs milliseconds, and seconds where it was made to wait; one that needs a minute has lost the request. After the last message the
same holds of the stream's end.

Time in which this process stood still is no worker's silence.
"""

import asyncio
from collections.abc import Callable
from typing import Final

LATE_S: Final = 0.5
"""By so much a timer is late only where this process itself stood still (stopped, swapped out, its machine suspended). What came meanwhile
lies unread, and so long it takes at most to be read."""


class IdleWatch:
    """One call's watch. ``stop`` it when the call is over."""

    __slots__ = ("_end", "_silent_since", "_timeout_s", "_timer", "has_ended")

    def __init__(
        self, timeout_s: float, silent_since: Callable[[], float | None], end: Callable[[], object]
    ) -> None:
        """``silent_since`` says since when the worker owes a token, by the event loop's clock, None where it owes none; ``end`` ends the
        call. 0 seconds watch nothing. Needs a running event loop."""
        self._timeout_s = timeout_s
        self._silent_since = silent_since
        self._end = end
        self.has_ended = False
        """Whether the call was ended because nothing came."""

        self._timer: asyncio.TimerHandle | None = None
        if timeout_s:
            self._look_at(asyncio.get_running_loop().time() + timeout_s)

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        since = self._silent_since()
        now = loop.time()
        due = (now if since is None else since) + self._timeout_s
        if due <= now and self._timer is not None and now - self._timer.when() > LATE_S:
            due = now + LATE_S
        if due > now:
            self._look_at(due)
            return
        self.has_ended = True
        self._end()

    def _look_at(self, due: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(due, self._look)
