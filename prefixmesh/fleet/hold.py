"""Who holds the fleet of this user: one process at a time, by a lock that the operating system drops when it dies.

The lock's file also names the holder, so a process id is believed only while the lock is held and never belongs to a stranger
that was given the same number later.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from prefixmesh import fleet_state, paths
from prefixmesh.errors import ConfigError, NotFoundError
from prefixmesh.fleet_state import FleetState

ALREADY_UP: Final = "a fleet is already up; stop it with: prefixmesh down"

REVIVE_SIGNAL: Final = signal.SIGUSR1
"""Asks the holder to try again what was given up."""

ATTEMPTS: Final = 3
"""Whoever only looks (``find_holder``) has the lock for a moment, which must not pass for a fleet."""

ATTEMPT_INTERVAL_S: Final = 0.02


def hold_file() -> Path:
    """The lock, beside the fleet's state."""
    return paths.fleet_state_file().with_suffix(".lock")


@contextmanager
def hold_fleet() -> Iterator[None]:
    """Be the holder; raises ConfigError when another process is."""
    path = hold_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        _lock(file)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def find_holder() -> int | None:
    """Process id of the holder; None when nobody holds the fleet."""
    try:
        with hold_file().open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read()
                return int(text) if text.isdecimal() else None
    except FileNotFoundError:
        pass
    return None


def find_fleet() -> FleetState | None:
    """What is remembered of the fleet that is up; None when none is. One that a supervisor looks after needs no holder: whether it
    still runs, only its Ray cluster knows. Reads two small files."""
    is_held = find_holder() is not None
    try:
        state = fleet_state.load()
    except NotFoundError:
        return None  # or not up yet
    return state if is_held or state.supervisor else None


def check_no_fleet() -> None:
    """Raise ConfigError when a fleet of this user is up, or may be."""
    if find_holder() is not None or find_fleet() is not None:
        raise ConfigError(ALREADY_UP)


def _lock(file: IO[str]) -> None:
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if attempt + 1 == ATTEMPTS:
                raise ConfigError(ALREADY_UP) from error
            time.sleep(ATTEMPT_INTERVAL_S)
        else:
            return
