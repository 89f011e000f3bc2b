"""Ends a worker's call that has begun to answer and says nothing any more, though its connection stands.

Before the first token silence is no failure: a long prompt takes what it takes, and others may be in front of it. Between tokens a worker
that is well needs milliseconds, and seconds where it was made to wait; one that needs a minute has lost the request.
"""

import asyncio
from collections.abc import Callable


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
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look)

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        since = self._silent_since()
        now = loop.time()
        due = (now if since is None else since) + self._timeout_s
        if due > now:
            self._timer = loop.call_at(due, self._look)
            return
        self.has_ended = True
        self._end()
