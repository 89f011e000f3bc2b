"""The engine's process: ``python -m prefixmesh.worker.engine_process FD CONFIG``, started by ``process_engine`` and nobody else.

Three threads. The main one runs the step loop. A reader takes commands off the socket, and ends the whole process the moment the
front is gone, whatever the main thread is computing. A writer sends events, so that a front that is slow to read does not hold up
a step; one that does not read at all for ``FRONT_STALL_S`` is taken for dead.
"""

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from prefixmesh.collector import StepCollector
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, FrameError, ModelFileError
from prefixmesh.worker.engine_loop import CommandInbox, run_engine_loop
from prefixmesh.worker.framing import (
    FromEngine,
    Loading,
    Ready,
    StartFailed,
    decode_command,
    encode_frame,
    receive_frame,
)
from prefixmesh.worker.messages import Event, Shutdown, StepEvents

logger = logging.getLogger(__name__)

MAX_UNSENT_FRAMES: Final = 1024
"""Steps whose events wait for the socket: seconds of a front's absence, at a few hundred bytes each."""

FRONT_STALL_S: Final = 30.0
"""A front that takes nothing for so long, with all buffers full, is not coming back; its callers are long gone."""

PR_SET_PDEATHSIG: Final = 1
"""Linux's number for it (prctl(2))."""

EXIT_FRONT_GONE: Final = 3
EXIT_START_FAILED: Final = 4
EXIT_ENGINE_FAILED: Final = 5


def main() -> None:
    """Serve one front until it goes away or says so."""
    _die_with_front()
    descriptor, settings = int(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # The front decides when the engine ends; a Ctrl-C or a service manager signals the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    inbox = CommandInbox()
    outbox = _Outbox(connection)
    threading.Thread(target=_read_commands, args=(connection, inbox), name="commands", daemon=True).start()
    code = _serve(settings, inbox, outbox)
    outbox.finish()
    sys.stderr.flush()
    os._exit(code)  # the reader blocks in a system call that a normal exit would wait for


def _die_with_front() -> None:
    """Have the kernel kill this process with the thread that started it, which is the one of the front's event loop.

    The reader sees the front's death as well, but not while the process is stopped, or while one long call of a library keeps the
    interpreter: its memory, on a GPU too, would be held for as long.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(settings: str, inbox: CommandInbox, outbox: "_Outbox") -> int:
    try:
        config = msgspec.json.decode(settings, type=EngineConfig)
        # Only here: importing torch takes seconds, in which the reader watches the front already.
        from prefixmesh.worker.engine_builder import build_engine

        core = build_engine(
            config, progress=lambda doing: outbox.put(Loading(doing=doing)), on_copied=inbox.wake
        )
    except ConfigError as error:
        outbox.put(StartFailed(kind="config", problem=str(error)))
        return EXIT_START_FAILED
    except ModelFileError as error:
        outbox.put(StartFailed(kind="model", problem=str(error)))
        return EXIT_START_FAILED
    except Exception as error:
        logger.exception("engine.start_failed")
        outbox.put(StartFailed(kind="internal", problem=f"{type(error).__name__}: {error}"))
        return EXIT_START_FAILED
    collector = StepCollector()
    outbox.put(Ready(info=core.info))

    def send(events: Sequence[Event]) -> None:
        outbox.put(StepEvents(events=list(events)))

    try:
        run_engine_loop(core, inbox, send, time.monotonic, housekeeper=collector)
    except (
        Exception
    ):  # a bug, or a GPU that is lost: either way nobody is served any more, and an orderly exit might hang
        logger.exception("engine.failed")
        return EXIT_ENGINE_FAILED
    core.close()
    return 0


def _read_commands(connection: socket.socket, inbox: CommandInbox) -> None:
    """Until the front is gone; then there is nobody to compute for. After ``Shutdown`` the main thread ends the process, once it has written
    what outlives it, and the front sees to it that this does not take long."""
    was_told = False
    try:
        while not was_told and (body := receive_frame(connection)) is not None:
            command = decode_command(body)
            inbox.put(command, wait=True)
            was_told = isinstance(command, Shutdown)
    except FrameError:
        logger.exception("engine.bad_frame")
    finally:
        if not was_told:
            os._exit(EXIT_FRONT_GONE)


class _Outbox:
    """Frames on their way to the front: a bounded queue and the thread that empties it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames: queue.Queue[bytes | None] = queue.Queue(MAX_UNSENT_FRAMES)
        self._thread = threading.Thread(target=self._write, name="events", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine) -> None:
        """Send soon. Blocks while the front is behind, and ends the process when it does not read any more."""
        try:
            self._frames.put(encode_frame(message), timeout=FRONT_STALL_S)
        except queue.Full:
            logger.error("engine.front_stalled unsent_frames=%d", MAX_UNSENT_FRAMES)
            os._exit(EXIT_FRONT_GONE)

    def finish(self) -> None:
        """Send what is left."""
        self._frames.put(None)
        self._thread.join(FRONT_STALL_S)

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                os._exit(EXIT_FRONT_GONE)


if __name__ == "__main__":
    main()
