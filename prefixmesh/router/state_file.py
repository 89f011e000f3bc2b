"""A store in one file of this machine, for one router: what ``prefixmesh up`` uses.

Every write makes the whole file anew beside the old one, flushes it to the disk, and puts it in the old one's place: whenever the power
goes, one of the two is there, whole. A write is told to be done after that, and is seen by nobody before. It costs O(size of the state)
and a few milliseconds of the disk; settings change seldom. A lock beside the file keeps a second process out.
"""

import asyncio
import fcntl
import glob
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from prefixmesh.errors import ConfigError, UnavailableError
from prefixmesh.router.state_store import Change, Entry
from prefixmesh.router.state_table import StateTable, Watchers

FORMAT: Final = 1
"""Of the file; another is refused, so that an older router does not lose what a newer one has written."""

_DRAFT: Final = ".draft"


class _Contents(msgspec.Struct, frozen=True):
    """What the file holds, as JSON; values in base64."""

    format: int
    version: int
    entries: list[Entry]


class FileStore:
    """``StateStore`` in a file. One event loop owns it."""

    def __init__(self, path: Path) -> None:
        """Read the file, or begin with nothing where there is none. Raises ConfigError when it cannot be used or is in use."""
        self._path = path
        self._watchers = Watchers()
        self._writing = asyncio.Lock()
        self._lock_file = _lock(path)
        try:
            _sweep(path)
            self._table = _read(path)
        except BaseException:
            os.close(self._lock_file)
            raise

    def __repr__(self) -> str:
        return f"FileStore({self._path}: {self._table!r})"

    async def get(self, key: str) -> Entry | None:
        """See ``StateStore``."""
        return self._table.get(key)

    async def entries(self, prefix: str) -> list[Entry]:
        """See ``StateStore``."""
        return self._table.entries(prefix)

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int | None:
        """See ``StateStore``."""
        change = await self._write(lambda table: table.put(key, value, expect))
        return None if change is None else change.version

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """See ``StateStore``."""
        return await self._write(lambda table: table.delete(key, expect)) is not None

    def watch(self, prefix: str) -> AsyncGenerator[Change]:
        """See ``StateStore``."""
        return self._watchers.watch(prefix, self._present)

    async def now(self) -> float:
        """See ``StateStore``. This machine's."""
        return time.time()

    @property
    def is_shared(self) -> bool:
        """See ``StateStore``."""
        return False

    async def close(self) -> None:
        """See ``StateStore``. A write that is under way is finished first."""
        self._watchers.close()
        async with self._writing:
            if self._lock_file >= 0:
                os.close(self._lock_file)  # which lets go of the lock
                self._lock_file = -1

    def _present(self, prefix: str) -> list[Entry]:
        return self._table.entries(prefix)  # of the table as it is then: every write makes a new one

    async def _write(self, change_table: Callable[[StateTable], Change | None]) -> Change | None:
        # To the end also where the caller is cancelled: what is on the disk and what is told must not part.
        return await asyncio.shield(asyncio.ensure_future(self._write_whole(change_table)))

    async def _write_whole(self, change_table: Callable[[StateTable], Change | None]) -> Change | None:
        async with self._writing:
            if self._lock_file < 0:
                raise UnavailableError("the state's file is closed")
            table = self._table.copy()
            change = change_table(table)
            if change is None:
                return None
            data = _encode(table)
            try:
                await asyncio.to_thread(_replace, self._path, data)
            except OSError as error:
                raise UnavailableError(f"cannot keep the state in {self._path}: {error.strerror}") from error
            self._table = table
            self._watchers.tell(change)
            return change


def _lock(path: Path) -> int:
    """Hold the file for this process; the kernel lets go of it however the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise ConfigError(f"cannot keep the state in {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"another router keeps its state in {path}; give each a file of its own") from error
    return descriptor


def _sweep(path: Path) -> None:
    """Remove what writers that died have left."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*{_DRAFT}"):
        with suppress(OSError):
            draft.unlink()


def _read(path: Path) -> StateTable:
    try:
        contents = msgspec.json.decode(path.read_bytes(), type=_Contents)
    except FileNotFoundError:
        return StateTable()
    except OSError as error:
        raise ConfigError(f"cannot read the state in {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} does not hold a router's state ({error})") from error
    if contents.format != FORMAT:
        raise ConfigError(f"{path} holds state of format {contents.format}; this version reads {FORMAT}")
    return StateTable(contents.entries, contents.version)


def _encode(table: StateTable) -> bytes:
    return msgspec.json.encode(_Contents(FORMAT, table.version, table.entries(""))) + b"\n"


def _replace(path: Path, data: bytes) -> None:
    """Put ``data`` in the file's place, mode 600; afterwards it will survive a crash of the machine."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_DRAFT)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the new name, too, is only in memory before
    finally:
        os.close(folder)
