"""The engine's figures for whoever asks often: the newest that it has told, without ever waiting long for newer ones.

An engine answers between two steps, and a step may take seconds. Busy is not dead, so what was told last counts until something
newer is known, and its age is told beside it. However many ask, one question at a time is under way.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.messages import Stats
from prefixmesh.worker.unheard import look_at

STATS_WAIT_S: Final = 0.2
"""How long whoever asks waits for figures newer than those told last."""


class RecentStats:
    """Figures of one engine; one event loop owns them."""

    def __init__(
        self,
        engine: EngineClient,
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``mark`` names the moment of a question: what was submitted by then is counted in the answer."""
        self._engine = engine
        self._take_mark = mark
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._ask_again = False
        self._told_at = 0.0
        self.last: Stats | None = None
        """What was told last; None before the first answer."""

        self.mark = mark()
        """The moment of the question that ``last`` answers."""

        self.on_answer: Callable[[], None] = _ignore
        """Called after each answer that is as new as was asked for."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the engine answered last; None before the first answer."""
        return None if self.last is None else self._clock() - self._told_at

    async def read(self) -> Stats:
        """The newest figures: waits for the first ones as long as it takes, for newer ones ``STATS_WAIT_S``.

        Raises UnavailableError once the engine is gone.
        """
        asking = self._ask()
        await asyncio.wait({asking}, timeout=None if self.last is None else STATS_WAIT_S)
        if asking.done():
            asking.result()
        assert self.last is not None
        return self.last

    def ask(self) -> None:
        """Have ``last`` renewed by what is true from now on, as soon as the engine answers; waits for nothing. Needs a running event loop."""
        if self._is_asking:
            self._ask_again = True  # the question that is under way was about an earlier moment
        else:
            self._ask()

    async def refresh(self) -> None:
        """Have ``last`` as new as can be within ``STATS_WAIT_S``; an engine that is gone changes nothing."""
        await asyncio.wait({self._ask()}, timeout=STATS_WAIT_S)

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None and not self._asking.done()

    def _ask(self) -> "asyncio.Task[None]":
        if not self._is_asking or self._asking is None:
            self._asking = asyncio.create_task(self._take_answer())
            self._asking.add_done_callback(look_at)
        return self._asking

    async def _take_answer(self) -> None:
        mark = self._take_mark()
        self.last = await self._engine.stats()
        self.mark = mark
        self._told_at = self._clock()
        self._asking = None
        if self._ask_again:
            self._ask_again = False
            self._ask()
        else:
            self.on_answer()


def _ignore() -> None:
    """Nobody waits for answers."""
