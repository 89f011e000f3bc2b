"""Sorting an engine's events into the streams of its requests: what both makers of ``EngineClient`` share."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from prefixmesh.errors import InternalError, PrefixmeshError
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.messages import (
    Abort,
    AdapterAnswer,
    AdapterCommand,
    CacheChanges,
    Command,
    Ended,
    Event,
    GetStats,
    Refused,
    Stats,
    Submit,
)
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand


class EventStreams:
    """The open streams of one engine; owned by the front's event loop.

    A stream's queue holds at most the events of one request, which ``max_tokens`` bounds, and there are at most as many streams
    as the engine runs and queues.
    """

    def __init__(self, send: Callable[[Command], None], drained: Callable[[], Awaitable[None]]) -> None:
        """``send`` hands a command to the engine without waiting, and raises when it cannot; ``drained`` waits until the engine
        keeps up with what was sent."""
        self._send = send
        self._drained = drained
        self._queues: dict[str, asyncio.Queue[RequestEvent | None]] = {}
        self._stats: deque[asyncio.Future[Stats]] = deque()
        self._questions: dict[int, asyncio.Future[AdapterAnswer | PrefixAnswer]] = {}
        self._last_question = 0
        self._gone: PrefixmeshError | None = None
        self.on_cache_changes: Callable[[CacheChanges], None] = _ignore
        """Who is told what happens to the cache."""

        self.closed = asyncio.Event()

    async def stream(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        """``EngineClient.submit``."""
        self._check_alive()
        request_id = command.request_id
        if request_id in self._queues:
            raise InternalError(f"two requests with the id {request_id}")
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            self._send(command)
        except BaseException:
            del self._queues[request_id]
            raise
        ended = False
        try:
            await self._drained()
            while not ended:
                event = await queue.get()
                if event is None:
                    ended = True
                    self._check_alive()
                    return
                ended = isinstance(event, Ended | Refused)
                yield event
        finally:
            del self._queues[request_id]
            if not ended:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """``EngineClient.abort``. Never waits, so that it can be called while a task is being cancelled."""
        if self._gone is None:
            # An engine that cannot be told any more is going, and its requests with it; the caller's own end must not be replaced.
            with suppress(PrefixmeshError):
                self._send(Abort(request_id=request_id))

    async def stats(self) -> Stats:
        """``EngineClient.stats``: answers come in the order of the questions."""
        self._check_alive()
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._send(GetStats())
        self._stats.append(waiter)
        return await waiter

    async def ask(self, make: Callable[[int], AdapterCommand]) -> AdapterAnswer:
        """Send the command that ``make`` makes with a number, and wait for the answer with that number: they come in any order."""
        answer = await self._ask(make)
        assert isinstance(answer, AdapterAnswer), answer
        return answer

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        """``EngineClient.ask_prefix``."""
        answer = await self._ask(make)
        assert isinstance(answer, PrefixAnswer), answer
        return answer

    async def _ask(
        self, make: Callable[[int], AdapterCommand | PrefixCommand]
    ) -> AdapterAnswer | PrefixAnswer:
        self._check_alive()
        self._last_question += 1
        number = self._last_question
        waiter: asyncio.Future[AdapterAnswer | PrefixAnswer] = asyncio.get_running_loop().create_future()
        self._send(make(number))
        self._questions[number] = waiter
        try:
            return await waiter
        finally:
            self._questions.pop(number, None)

    def dispatch(self, events: Sequence[Event]) -> None:
        """Give each event to its stream; what belongs to streams that were closed is dropped."""
        if self._gone is not None:
            return
        for event in events:
            if isinstance(event, Stats):
                waiter = self._stats.popleft()
                if not waiter.done():
                    waiter.set_result(event)
                continue
            if isinstance(event, AdapterAnswer | PrefixAnswer):
                answered = self._questions.get(event.question)
                if answered is not None and not answered.done():
                    answered.set_result(event)
                continue
            if isinstance(event, CacheChanges):
                self.on_cache_changes(event)
                continue
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def fail_all(self, error: PrefixmeshError) -> None:
        """The engine is gone: every stream and every question ends in ``error``. Later calls change nothing."""
        if self._gone is not None:
            return
        self._gone = error
        for queue in self._queues.values():
            queue.put_nowait(None)
        waiters: list[asyncio.Future[Any]] = [*self._stats, *self._questions.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._stats.clear()
        self._questions.clear()
        self.closed.set()

    def _check_alive(self) -> None:
        if self._gone is not None:
            raise type(self._gone)(str(self._gone))  # a fresh one each time: several tasks raise it


def _ignore(changes: CacheChanges) -> None:
    """Nobody watches the cache."""
