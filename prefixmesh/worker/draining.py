"""Taking a worker out of service and back: it takes nothing new, finishes what runs, and can be told that it goes on.

Health says NOT_SERVING at once, and so does the next report, so that routers send nothing more; what still comes is refused by the table of
calls. Neither the process nor the cache is touched: after an undo the worker answers as if nothing had been.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from grpc_health.v1 import health, health_pb2

from prefixmesh.worker.running_calls import RunningCalls

_log = logging.getLogger(__name__)

DRAINING: Final = "this worker is draining: it takes nothing new until it is told to go on"


class Drainer:
    """The drains of one worker. One event loop owns it."""

    def __init__(
        self, calls: RunningCalls, servicer: "health.aio.HealthServicer", names: Sequence[str]
    ) -> None:
        """``names`` are the services whose health ``servicer`` tells."""
        self._calls = calls
        self._health = servicer
        self._names = names
        self._undone = asyncio.Event()
        self.on_change: Callable[[], None] = _ignore
        """Called when a drain has begun or was undone."""

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused because of a drain."""
        return self._calls.is_draining

    async def drain(self, grace_s: float) -> int:
        """Take nothing new from now on; returns the calls that still run, once there are none, ``grace_s`` are over, or it is undone. The
        drain goes on, whatever becomes of the caller. May be called again."""
        if not self.is_draining:
            _log.info("worker_draining running_calls=%d", len(self._calls))
            self._undone.clear()
            await self._set(DRAINING)
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
            _log.info("worker_drain_undone running_calls=%d", len(self._calls))
            await self._set(None)
            self._undone.set()
        return len(self._calls)

    async def _set(self, reason: str | None) -> None:
        self._calls.drain(reason)
        self.on_change()
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            # As it is by now: of two that cross each other, the later one is the last to say so.
            await self._health.set(name, states.NOT_SERVING if self.is_draining else states.SERVING)


def _ignore() -> None:
    """Nobody is told."""
