"""The store's clock as this router reckons it between two questions: what it said last, and what has passed since by a clock that never jumps.

So pins end at one moment for all routers, whatever their own clocks say, and go on to end while the store is out of reach.
"""

import time
from collections.abc import Callable
from typing import Final

from prefixmesh.router.state_store import StateStore

_MS_PER_S: Final = 1000.0


class StoreClock:
    """Asks a store for its time. Before it has answered once, nothing has ended."""

    def __init__(self, store: StateStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._ahead_s: float | None = None
        """The store's clock less ours."""

    async def ask(self) -> float:
        """Seconds since 1970 by the store's clock, at some moment within this call. Raises UnavailableError."""
        told = await self._store.now()
        # What the answer took is not known to lie before or behind the reading: the earlier time ends nothing too soon.
        self._ahead_s = told - self._monotonic()
        return told

    @property
    def unix_ms(self) -> int:
        """Milliseconds since 1970 by the store's clock, now; 0 while it is not known."""
        return 0 if self._ahead_s is None else round(_MS_PER_S * (self._monotonic() + self._ahead_s))
