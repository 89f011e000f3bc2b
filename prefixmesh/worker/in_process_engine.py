"""An engine on a thread of the front's own process: for tests and simulation, behind the interface of ``engine_client``."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    EngineLostError,
    InternalError,
    OverloadedError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.worker.adapter_calls import AdapterCalls
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.engine_loop import CommandInbox, run_engine_loop
from prefixmesh.worker.event_streams import EventStreams
from prefixmesh.worker.messages import (
    AdapterInfo,
    CacheChanges,
    Command,
    EngineInfo,
    Event,
    Flush,
    Shutdown,
    Stats,
    Submit,
)
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand

logger = logging.getLogger(__name__)

CLOSE_WAIT_S: Final = 10.0
"""How long ``close`` waits for the step that is being computed; the thread is a daemon and holds nobody up after that."""


class InProcessEngine:
    """``EngineClient`` over a daemon thread. ``make_core`` stands in for the real engine in tests; it runs on the thread."""

    def __init__(self, config: EngineConfig, make_core: Callable[[], EngineCore] | None = None) -> None:
        self._inbox = CommandInbox()
        self._make_core = make_core or (lambda: build_engine(config, on_copied=self._inbox.wake))
        self._streams = EventStreams(self._send, _at_once)
        self._adapters = AdapterCalls(config.adapter_root, self._streams.ask)
        self._thread: threading.Thread | None = None

    @property
    def closed(self) -> asyncio.Event:
        """Set when the engine's thread has ended."""
        return self._streams.closed

    def watch_cache(self, listener: Callable[[CacheChanges], None]) -> None:
        """See ``EngineClient.watch_cache``."""
        self._streams.on_cache_changes = listener

    async def start(self) -> EngineInfo:
        """Load the model on the engine's thread."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loop, ready), name="prefixmesh-engine", daemon=True
        )
        self._thread.start()
        info = await ready
        self._adapters.linear_sizes = info.linear_sizes
        return info

    def submit(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        """See ``EngineClient.submit``."""
        return self._streams.stream(command)

    def abort(self, request_id: str) -> None:
        """See ``EngineClient.abort``."""
        self._streams.abort(request_id)

    async def stats(self) -> Stats:
        """See ``EngineClient.stats``."""
        return await self._streams.stats()

    async def flush(self) -> None:
        """Commands are taken in order, so the answer to a later question proves the flush done."""
        self._send(Flush())
        await self._streams.stats()

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        """See ``EngineClient.load_adapter``."""
        return await self._adapters.load(name, path, pinned=pinned)

    async def unload_adapter(self, name: str) -> None:
        """See ``EngineClient.unload_adapter``."""
        await self._adapters.unload(name)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """See ``EngineClient.list_adapters``."""
        return await self._adapters.list()

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        """``EngineClient.ask_prefix``."""
        return await self._streams.ask_prefix(make)

    async def close(self) -> None:
        """End the thread after the step it is in."""
        self._streams.fail_all(UnavailableError("the engine was closed"))
        self._inbox.put(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_WAIT_S)

    def _send(self, command: Command) -> None:
        if not self._inbox.put(command):
            raise OverloadedError("too many requests at once")

    def _run(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[EngineInfo]") -> None:
        error: PrefixmeshError = UnavailableError("the engine was closed")
        try:
            core = self._make_core()
            _tell(loop, _resolve, ready, core.info)

            def send(events: Sequence[Event]) -> None:
                _tell(loop, self._streams.dispatch, events)

            try:
                run_engine_loop(core, self._inbox, send, time.monotonic)
            finally:
                core.close()
        except PrefixmeshError as failure:
            logger.exception("engine.failed")
            _tell(loop, _reject, ready, failure)
            error = EngineLostError(f"the engine failed: {failure}")
        except Exception as failure:  # whatever it was, the front must know that nobody serves any more
            logger.exception("engine.failed")
            _tell(loop, _reject, ready, InternalError(f"the engine failed: {type(failure).__name__}"))
            error = EngineLostError("the engine failed")
        finally:
            _tell(loop, self._streams.fail_all, error)


async def _at_once() -> None:
    """The inbox takes commands without waiting."""


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        logger.debug("engine.front_gone")  # the front's loop is closed: nobody is left to be told


def _resolve(ready: "asyncio.Future[EngineInfo]", info: EngineInfo) -> None:
    if not ready.done():
        ready.set_result(info)


def _reject(ready: "asyncio.Future[EngineInfo]", error: PrefixmeshError) -> None:
    if not ready.done():
        ready.set_exception(error)
