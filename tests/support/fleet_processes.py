"""Running the ``prefixmesh`` command as its users do, and finding every process it started."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

HOME_VARIABLE = "PREFIXMESH_HOME"
COMMAND_TIMEOUT_S = 120
"""Far more than a command takes, on a machine that is busy with other tests."""

ALL_GONE_WITHIN_S = 20.0


def environment(home: Path) -> dict[str, str]:
    """Of a command with a home of its own; whatever it starts on this machine inherits it, which is how it is found again."""
    return {**os.environ, HOME_VARIABLE: str(home), "OMP_NUM_THREADS": "1"}


def prefixmesh(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end. Its output goes through files: a background process may keep a pipe open."""
    out, err = home / "out.txt", home / "err.txt"
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run(  # noqa: PLW1510  the exit code is part of what is tested
            _command(arguments),
            env=environment(home),
            stdout=stdout,
            stderr=stderr,
            timeout=COMMAND_TIMEOUT_S,
        )
    return subprocess.CompletedProcess(done.args, done.returncode, out.read_text(), err.read_text())


@contextlib.contextmanager
def foreground(home: Path, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """The command while it runs; stderr goes into the file ``err.txt`` of its home, stdout is a pipe. Killed if it is left running."""
    with (
        (home / "err.txt").open("w") as stderr,
        subprocess.Popen(
            _command(arguments), env=environment(home), stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """What the process prints up to the line that holds ``text``; fails when it ends before that."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"the process ended with {process.wait()} before it said {text!r}: {read}")


def processes_of(home: Path) -> list[psutil.Process]:
    """Living processes that were started, however indirectly, by a command with this home."""
    return [process for process in psutil.process_iter() if _has_home(process, home)]


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_gone(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still live after a time in which they should have ended."""
    deadline = time.monotonic() + ALL_GONE_WITHIN_S
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.1)
    return alive


def is_alive(process: psutil.Process) -> bool:
    """Running, and not only unreaped by its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _has_home(process: psutil.Process, home: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(HOME_VARIABLE) == str(home) and is_alive(process)
    return False


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "prefixmesh.cli.main", *arguments]
