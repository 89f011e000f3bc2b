"""A history in a file of JSON lines: written by a thread, so that no disk makes a request wait, and read back line by line.

Lines are appended, so that several lives of one router share its file; two routers at once need one each. What the disk does not take is
counted and said in the file, as ``lost``, once it takes something again.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from prefixmesh.errors import ConfigError
from prefixmesh.history import ANY, Began, Closed, History, Lost, Record

_log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
"""How old a line may be that is not in the file yet: so much of the end is missing after a kill."""

MAX_WAITING: Final = 65_536
"""Lines that wait for the disk, some 10 MB: half a second of a busy router's tokens. More are lost, and counted."""


class HistoryFile(History):
    """Appends to a file until ``close``. May be noted to from any thread."""

    def __init__(
        self,
        path: Path,
        writer: str,
        *,
        clock: Callable[[], float] = time.time,
        max_waiting: int = MAX_WAITING,
        flush_s: float = FLUSH_S,
    ) -> None:
        """``writer`` is who notes, for this life. Raises ConfigError when the file cannot be opened."""
        super().__init__(clock)
        self._path = path
        self._writer = writer
        self._max_waiting = max_waiting
        self._flush_s = flush_s
        try:
            # By its own hand: a buffered file would try again to write what the disk refused, and fail at every close.
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"history: cannot write {path}: {error.strerror}") from error
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._lost = 0
        self._is_torn = path.stat().st_size > 0
        self._is_failing = False
        self._closing = threading.Event()
        self.note(Began, writer)
        self._thread = threading.Thread(target=self._write_until_closed, name="history", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Have it written within ``flush_s``. O(1)."""
        line = msgspec.json.encode(record)
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                self._lost += 1
            else:
                self._waiting.append(line)

    def close(self) -> None:
        """Write what waits, say that this life ended in order, and close the file. Closed already: nothing happens."""
        if not self._closing.is_set():
            self.note(Closed, self._writer)
            self._closing.set()
            self._thread.join()

    def _write_until_closed(self) -> None:
        while not self._closing.wait(self._flush_s):
            self._write_waiting()
        self._write_waiting()
        try:
            self._file.close()
        except OSError as error:
            self._say_failing(error)

    def _write_waiting(self) -> None:
        with self._lock:
            lines, self._waiting = self._waiting, []
            lost, self._lost = self._lost, 0
        if not (lines or lost):
            return
        if lost:
            now = round(self._clock(), 3)
            lines.append(msgspec.json.encode(Lost(now, self._writer, count=lost)))
        # A line that was cut short, by a full disk or by a kill, must not swallow the next.
        text = b"\n" * self._is_torn + b"\n".join(lines) + b"\n"
        try:
            written = 0
            while written < len(text):
                written += self._file.write(text[written:])
            self._is_torn = self._is_failing = False
        except OSError as error:
            self._is_torn = True
            with self._lock:
                self._lost += lost + len(lines) - (1 if lost else 0)
            self._say_failing(error)

    def _say_failing(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.error("history_not_written path=%s problem=%r", self._path, error.strerror)


class Line(NamedTuple):
    """One line of a file."""

    source: str
    number: int
    record: Record | None
    """None where the line is torn, or of a kind that only later versions know."""


def read_history(path: Path) -> Iterator[Line]:
    """The lines of a file in their order; empty ones are left out. Raises ConfigError when it cannot be read."""
    decoder = msgspec.json.Decoder(ANY)
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    yield Line(str(path), number, _decode(decoder, text))
    except OSError as error:
        raise ConfigError(f"history {path}: {error.strerror}") from error


def _decode(decoder: "msgspec.json.Decoder[Record]", text: bytes) -> Record | None:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
