"""Cancelling a task at a chosen await: every place where a cancellation can land, one after the other, instead of where it happens to."""

import asyncio
from collections.abc import Collection, Coroutine, Generator
from typing import Any


class CancelledAt:
    """Awaits ``coroutine``, whose task is cancelled when it suspends for the n-th time, for each n in ``points`` (from 1).

    That is what ``Task.cancel`` does to a task that waits there: what it waits for is cancelled, and CancelledError comes out of the await.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], points: Collection[int]) -> None:
        self._coroutine = coroutine
        self._points = points
        self.reached = False
        """Whether it suspended so often that it was cancelled."""

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        awaits, error = 0, None
        while True:
            try:
                waited_for = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            awaits += 1
            if awaits in self._points:
                self.reached = True
                task.cancel()
            error = None
            try:
                yield waited_for
            except BaseException as thrown:  # into the coroutine with it, whatever it is
                error = thrown


async def cancel_at(coroutine: Coroutine[Any, Any, Any], points: Collection[int]) -> bool:
    """Run ``coroutine`` as a task of its own, cancelled at ``points``; whether it came so far. Its errors are raised."""
    awaited = CancelledAt(coroutine, points)

    async def run() -> None:
        await awaited

    task = asyncio.create_task(run())
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return awaited.reached
