"""Turns on the event loop for work that many may ask for at the same time: one after the other, with as long a pause after each as it took.

Without them a thousand such calls, each of some milliseconds, hold up whoever comes behind them until the last one is done: new calls are taken
in one for each time that the loop goes round.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

LONGEST_PAUSE_S: Final = 0.1
"""After a turn that was long because it waited for something."""


class PacedTurns:
    """One event loop owns it. Who came first goes first."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = asyncio.Lock()
        self._free_at = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The block is nobody else's turn, and comes after the last one's pause."""
        async with self._lock:
            pause_s = self._free_at - self._clock()
            if pause_s > 0:
                await self._sleep(pause_s)
            began = self._clock()
            try:
                yield
            finally:
                ended = self._clock()
                self._free_at = ended + min(ended - began, LONGEST_PAUSE_S)
