"""A recording of a router's requests, in a file that ``prefixmesh replay`` and ``prefixmesh bench serve`` read.

A request is taken note of when it is over; a thread numbers and writes it, so that no request waits for it. What a caller streams from the
worker itself is not seen to its end here, and is not recorded; nor is what was refused before any worker had it. The file is new in each
life, for numbers of two lives mean different blocks, and only its owner may read it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prefixmesh.errors import ConfigError
from prefixmesh.router.request_numbers import MAX_RECORDED, RequestNumbers, SeenRequest

_log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
"""How old a request may be that is not in the file yet."""

MAX_WAITING_BLOCKS: Final = 1 << 18
"""Names of blocks that wait for the disk, some 10 MB; the requests that come then are left out, and counted."""

MAX_BYTES: Final = 1 << 30
"""Of a recording: nobody may fill a router's disk by asking."""

MAX_FILES: Final = 1000
"""Lives whose recordings stand beside each other before one must be taken away."""


class RequestRecorder:
    """Writes one file until ``close``, or until a bound is met. ``ended`` is for one thread."""

    def __init__(
        self,
        path: Path,
        block_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        most_requests: int = MAX_RECORDED,
        most_bytes: int = MAX_BYTES,
        flush_s: float = FLUSH_S,
    ) -> None:
        """``clock`` is the one that arrivals are told by. Raises ConfigError when the file cannot be made."""
        self._numbers = RequestNumbers(block_size, clock())
        self.path, self._file = _new_file(path)
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._flush_s = flush_s
        self._lock = threading.Lock()
        self._waiting: list[SeenRequest] = []
        self._waiting_blocks = 0
        self._left_out = 0
        self._requests = 0
        self._bytes = 0
        self._is_over = False
        self._closing = threading.Event()
        _log.info("recording path=%s", self.path)
        self._thread = threading.Thread(target=self._write_until_closed, name="record", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """False once the recording is over, whatever ended it."""
        return not self._is_over

    def ended(self, seen: SeenRequest) -> None:
        """Have a request written within ``flush_s``. O(1)."""
        blocks = seen.named_blocks + 1  # a request without any has its place, too
        with self._lock:
            if self._is_over or self._waiting_blocks + blocks > MAX_WAITING_BLOCKS:
                self._left_out += 1
            else:
                self._waiting.append(seen)
                self._waiting_blocks += blocks

    def close(self) -> None:
        """Write what waits, and close the file. Closed already: nothing happens."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()

    def _write_until_closed(self) -> None:
        self._write(self._numbers.header())
        while not self._closing.wait(self._flush_s):
            self._write_waiting()
        self._write_waiting()
        self._is_over = True
        os.close(self._file)
        _log.info("recorded path=%s requests=%d left_out=%d", self.path, self._requests, self._left_out)

    def _write_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._waiting_blocks = 0
        for place, seen in enumerate(waiting):
            if self._is_over:
                self._left_out += len(waiting) - place
                return
            self._write(self._numbers.lines(seen))
            self._requests += not self._is_over
            if self._requests >= self._most_requests or self._numbers.is_full:
                self._end(f"it has {self._requests} requests, as many as one may")

    def _write(self, text: bytes) -> None:
        """All of it or nothing: half a line would make a file that nobody reads."""
        if self._bytes + len(text) > self._most_bytes:
            self._end(f"it has {self._bytes} bytes, as many as one may")
            return
        try:
            written = 0
            while written < len(text):
                written += os.write(self._file, text[written:])
            self._bytes += written
        except OSError as error:
            os.ftruncate(self._file, self._bytes)
            self._end(f"cannot write: {error.strerror}")

    def _end(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            _log.warning("recording_over path=%s why=%r", self.path, why)


def _new_file(path: Path) -> tuple[Path, int]:
    """``path``, or where that is taken ``path`` with a number behind its stem; open for writing."""
    for number in range(MAX_FILES):
        name = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
        try:
            return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"record: cannot write {name}: {error.strerror}") from error
    raise ConfigError(f"record: {MAX_FILES} recordings called {path.name} are there already")
