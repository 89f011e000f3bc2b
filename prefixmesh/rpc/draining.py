"""Taking a server out of service and back: it takes nothing new, finishes what runs, and can be told that it goes on.

Health says NOT_SERVING at once, so that nobody sends more who looks; what still comes is refused by the table of calls. The process is
not touched: after an undo the server answers as if nothing had been. The same for workers and routers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

_log = logging.getLogger(__name__)


class Drainable(Protocol):
    """A table of running calls."""

    def __len__(self) -> int: ...

    @property
    def is_draining(self) -> bool:
        """Whether ``drain`` is in force."""
        ...

    def drain(self, reason: str | None) -> None:
        """Refuse further calls with ``reason`` until this is called with None; the running ones go on."""
        ...

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call runs; False when that took longer than ``timeout_s``."""
        ...


class Drainer:
    """The drains of one server. One event loop owns it."""

    def __init__(self, calls: Drainable, who: str, tell: Callable[[], Awaitable[None]]) -> None:
        """``who`` is what it is called to those that are refused; ``tell`` has health say how it is, and whoever else must know."""
        self._calls = calls
        self._who = who
        self._tell = tell
        self._undone = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused because of a drain."""
        return self._calls.is_draining

    async def drain(self, grace_s: float) -> int:
        """Take nothing new from now on; returns the calls that still run, once there are none, ``grace_s`` are over, or it is undone. The
        drain goes on, whatever becomes of the caller. May be called again."""
        if not self.is_draining:
            _log.info("draining who=%r running_calls=%d", self._who, len(self._calls))
            self._undone.clear()
            self._calls.drain(f"{self._who} is draining: it takes nothing new until it is told to go on")
            await self._tell()
        waits = {
            asyncio.create_task(self._calls.wait_idle(grace_s)),
            asyncio.create_task(self._undone.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return len(self._calls)

    async def undo(self) -> int:
        """Take calls as before; returns those that run. Who waits for the drain is answered."""
        if self.is_draining:
            _log.info("drain_undone who=%r running_calls=%d", self._who, len(self._calls))
            self._calls.drain(None)
            self._undone.set()  # before anything is waited for: another drain may begin meanwhile
            await self._tell()
        return len(self._calls)
