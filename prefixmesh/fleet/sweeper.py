"""Cleans up after a local Ray whose owner could not: ends what is left of it and removes its folder.

``python -m prefixmesh.fleet.sweeper FOLDER OWNER_PID`` runs beside the owner and waits on stdin, which closes when the owner ends,
however it ends. Ray's own agents outlive a killed parent by a minute or two, and nobody else would remove the folder. Linux only,
by ``/proc``; standard library only, so that it costs a few megabytes.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

KEEP: Final = b"keep"
"""The owner's last word when the folder's logs are to stay."""

SETTLE_S: Final = 5.0
"""Most of Ray ends by itself, and an engine after its front; what has not by then is told to."""

TERMINATE_S: Final = 3.0
"""How long what was told to end may take before it is killed."""

_POLL_S: Final = 0.1
_PROC: Final = Path("/proc")


def sweep(folder: Path, owner: int, settle_s: float = SETTLE_S, terminate_s: float = TERMINATE_S) -> None:
    """Wait until nobody writes below ``folder`` any more, first patiently, then by force, and remove it."""
    if not _wait_until(lambda: not writers_below(folder, owner), settle_s):
        _send(writers_below(folder, owner), signal.SIGTERM)
        if not _wait_until(lambda: not writers_below(folder, owner), terminate_s):
            _send(writers_below(folder, owner), signal.SIGKILL)
            _wait_until(lambda: not writers_below(folder, owner), terminate_s)
    shutil.rmtree(folder, ignore_errors=True)


def writers_below(folder: Path, owner: int) -> list[int]:
    """This user's processes that hold a file below ``folder`` open for writing, without ``owner`` and this one.

    Every process of Ray and every actor writes a log there. Whoever only reads one, such as a ``tail``, is a stranger. One pass over
    ``/proc``: some milliseconds.
    """
    excluded = {owner, os.getpid()}
    others = (
        entry for entry in _PROC.iterdir() if entry.name.isdecimal() and int(entry.name) not in excluded
    )
    return [int(entry.name) for entry in others if _writes_below(entry, folder)]


def _writes_below(process: Path, folder: Path) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        for descriptor in (process / "fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith(f"{folder}/") and _is_writable(process / "fdinfo" / descriptor.name):
                return True
    except OSError:
        pass  # it ended while it was looked at
    return False


def _is_writable(fdinfo: Path) -> bool:
    for line in fdinfo.read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _wait_until(is_so: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def main() -> None:
    """Wait for the owner's end, then sweep unless its last word was to keep the folder."""
    if sys.stdin.buffer.read() != KEEP:
        sweep(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
