"""An engine in a process of its own, so that streaming answers never takes the interpreter from the step loop.

The process is spawned (never forked) with one end of a socket pair. Either end's death is the end of the stream of bytes, which
the other one sees at once: no ping, no timeout.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    ConfigError,
    EngineLostError,
    FrameError,
    InternalError,
    ModelFileError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.worker.adapter_calls import AdapterCalls
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.event_streams import EventStreams
from prefixmesh.worker.framing import (
    FromEngine,
    Loading,
    Ready,
    StartFailed,
    decode_from_engine,
    encode_frame,
    read_frame,
)
from prefixmesh.worker.messages import (
    AdapterInfo,
    CacheChanges,
    Command,
    EngineInfo,
    Flush,
    Shutdown,
    Stats,
    StepEvents,
    Submit,
)
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand

logger = logging.getLogger(__name__)

CLOSE_WAIT_S: Final = 5.0
"""How long ``close`` lets the engine finish its step before it is killed."""


ENGINE_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""What the engine's process gets where the environment does not say otherwise. Torch's threads wait for each other a thousand
times a step. By default they wait spinning, so when anything else uses a core of theirs (another worker, a router, the client),
each wait lasts until the operating system takes the core away: measured with 2 threads on 2 busy cores, a decode step of 965 ms
instead of 95. Sleeping at once costs a quiet machine a third of its decode speed, because waking takes longer than most operations:
52 ms a step against 37 with so short a spin, which lasts about from one operation to the next (20,000 turns: 31 ms quiet, but
1,500 busy). Where several programs share each core for good, GOMP_SPINCOUNT=0 may be better.
GNU's OpenMP, which torch brings, reads the count; others know only the policy. Both are read once, when torch is loaded, so they must
stand before the process does."""


class ProcessEngine:
    """``EngineClient`` over a spawned process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._streams = EventStreams(self._send, self._drained)
        self._adapters = AdapterCalls(config.adapter_root, self._streams.ask)
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._reaped = False

    @property
    def closed(self) -> asyncio.Event:
        """Set when the engine's process is gone or its connection is."""
        return self._streams.closed

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before ``start``."""
        return None if self._process is None else self._process.pid

    def watch_cache(self, listener: Callable[[CacheChanges], None]) -> None:
        """See ``EngineClient.watch_cache``."""
        self._streams.on_cache_changes = listener

    async def start(self) -> EngineInfo:
        """Spawn the process and wait until it has loaded the model."""
        ours, theirs = socket.socketpair()
        try:
            self._process = _spawn(self._config, theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            info = await self._started(reader)
        except BaseException:
            await self.close()
            raise
        self._adapters.linear_sizes = info.linear_sizes
        self._reading = asyncio.create_task(self._read(reader))
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
        """Ask the process to end, and end it; nothing of it is left when this returns."""
        with contextlib.suppress(PrefixmeshError):
            self._send(Shutdown())
        self._streams.fail_all(UnavailableError("the engine was closed"))
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._reap()

    async def _started(self, reader: asyncio.StreamReader) -> EngineInfo:
        while True:
            match await self._receive(reader):
                case Loading(doing=doing):
                    logger.info("engine.loading doing=%s", doing)
                case Ready(info=info):
                    return info
                case StartFailed(kind="config", problem=problem):
                    raise ConfigError(problem)
                case StartFailed(kind="model", problem=problem):
                    raise ModelFileError(problem)
                case StartFailed(problem=problem):
                    raise InternalError(problem)
                case StepEvents():
                    raise FrameError("the engine told of a step before it was ready")
                case None:
                    raise UnavailableError("the engine's process ended while it was starting")

    async def _receive(self, reader: asyncio.StreamReader) -> FromEngine | None:
        body = await read_frame(reader)
        return None if body is None else decode_from_engine(body)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        error: UnavailableError = EngineLostError("the engine's process ended")
        try:
            while (message := await self._receive(reader)) is not None:
                if isinstance(message, StepEvents):
                    self._streams.dispatch(message.events)
        except FrameError as failure:
            error = failure
        except Exception:
            logger.exception("engine.reader_failed pid=%s", self.pid)
        finally:
            self._streams.fail_all(error)
            if self._writer is not None:
                self._writer.close()
        logger.error("engine.gone pid=%s", self.pid)
        await self._reap()

    async def _reap(self) -> None:
        """Wait for the process, which ends when its connection does; kill it when it does not."""
        process = self._process
        if process is None or self._reaped:
            return
        try:
            await asyncio.to_thread(process.wait, CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.warning("engine.killed pid=%d", process.pid)
            process.kill()
            await asyncio.to_thread(process.wait)
        self._reaped = True

    def _send(self, command: Command) -> None:
        if self._writer is None or self._writer.is_closing():
            raise UnavailableError("the engine is not running")
        self._writer.write(encode_frame(command))

    async def _drained(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()


def _spawn(config: EngineConfig, connection: socket.socket) -> "subprocess.Popen[bytes]":
    """A fresh interpreter. Its end of the socket pair is inherited by number; the settings travel as JSON."""
    arguments = [str(connection.fileno()), msgspec.json.encode(config).decode()]
    return subprocess.Popen(
        [sys.executable, "-m", "prefixmesh.worker.engine_process", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(connection.fileno(),),
        env=ENGINE_ENVIRONMENT | os.environ,
    )
