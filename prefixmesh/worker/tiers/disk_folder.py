"""The disk tier's folder: held by one process, tidied after a crash, and taken stock of at start."""

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from prefixmesh.errors import ConfigError
from prefixmesh.worker.tiers.disk_files import (
    BAD_SUFFIX,
    DRAFT_SUFFIX,
    SUFFIX,
    BadFileError,
    RunHeader,
    put_away,
    read_header,
)
from prefixmesh.worker.tiers.disk_index import DiskIndex, StoredFile
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, names_of

logger = logging.getLogger(__name__)

LOCK_FILE: Final = "lock"
LOCK_POLL_S: Final = 0.05
_FOLDER_MODE: Final = 0o700
_LOCK_MODE: Final = 0o600
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""What is written into it must not go to a file elsewhere that a link names."""


class Stock(NamedTuple):
    """What a folder held at start."""

    files: DiskIndex
    bad_files: int
    """Put away now."""

    foreign_files: int
    """Of other models and layouts: kept until there is no room for them."""


class _Found(NamedTuple):
    file: StoredFile
    used_at_ns: int
    is_foreign: bool


def lock_folder(folder: Path, wait_s: float = 0.0) -> int:
    """Make the folder if need be, and hold it for this process until the descriptor is closed, or the process ends, however it does. Another
    process that has it is given ``wait_s`` to end. Raises ConfigError when it cannot be used, and naming the holder when it stays held."""
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, _LOCK_FLAGS, _LOCK_MODE)
    except OSError as error:
        raise ConfigError(f"disk_cache_dir cannot be used: {folder}: {error.strerror}") from error
    give_up_at = time.monotonic() + wait_s
    while not _try_lock(descriptor):
        if time.monotonic() >= give_up_at:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"disk_cache_dir is in use by {holder}: {folder}; give each worker a folder of its own"
            )
        time.sleep(LOCK_POLL_S)
    with suppress(OSError):  # on a full disk nobody can be named
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    return descriptor


def take_stock(folder: Path, identity: DiskIdentity, max_bytes: int) -> Stock:
    """Read every file's header, put away what is bad, remove what writers that died have left, and what the bound has no room for. Some 50 µs a
    file. Files that are not the tier's by their names are left alone. Raises ConfigError when the folder cannot be read."""
    looked: dict[str, _Found] = {}
    """By name: a file that is put away now may take the place of one that was put away before, which is in the list too."""

    bad = 0
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ConfigError(f"disk_cache_dir cannot be read: {folder}: {error.strerror}") from error
    for name in names:
        path = folder / name
        if name.startswith(".") and name.endswith(DRAFT_SUFFIX):
            remove(path)
        elif name.endswith(SUFFIX + BAD_SUFFIX):
            looked |= _look(path, None, identity)
        elif name.endswith(SUFFIX):
            header, path = _read_or_put_away(path)
            bad += header is None
            looked |= _look(path, header, identity)
    # What was put away goes first; the others by their last use.
    found = sorted(
        looked.values(), key=lambda each: (not each.file.name.endswith(BAD_SUFFIX), each.used_at_ns)
    )
    index = DiskIndex(identity.layout, max_bytes)
    for file in index.found(each.file for each in found):
        remove(folder / file.name)
    return Stock(index, bad, sum(each.is_foreign for each in found))


def mark_used(folder: Path, names: list[str]) -> None:
    """Let files' times tell that they were used now, in this order. One that is gone is ignored."""
    for name in names:
        with suppress(OSError):
            os.utime(folder / name)


def remove(path: Path) -> None:
    """Remove a file; one that is gone, or cannot be removed, is left to the next start."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_or_put_away(path: Path) -> tuple[RunHeader | None, Path]:
    try:
        return read_header(path), path
    except BadFileError as error:
        logger.warning("disk.bad_file file=%s problem=%s", path.name, error)
        return None, put_away(path)
    except OSError as error:
        logger.warning("disk.unreadable_file file=%s problem=%s", path.name, error.strerror)
        return None, put_away(path)


def _look(path: Path, header: RunHeader | None, identity: DiskIdentity) -> dict[str, _Found]:
    try:
        status = path.lstat()
    except OSError:
        return {}
    is_foreign = header is not None and header.identity != identity
    if header is None or is_foreign:
        file = StoredFile(path.name, status.st_size, is_written=True)
    else:
        names = names_of(header.namespace, list(header.fingerprints), identity.layout)
        file = StoredFile(path.name, status.st_size, names, header.start_tokens, is_written=True)
    return {path.name: _Found(file, status.st_mtime_ns, is_foreign)}
