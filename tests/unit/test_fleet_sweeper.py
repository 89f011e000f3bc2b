"""What the sweeper ends and removes when a local Ray's owner is gone, and what it leaves alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefixmesh.fleet.sweeper import KEEP, sweep, writers_below

NOBODY = 0
READY = "print(flush=True); "
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


class Processes:
    """Programs that hold a file open until they are ended."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, file: Path, mode: str, before: str = "") -> "subprocess.Popen[bytes]":
        code = f"import sys; {before}f = open(sys.argv[1], {mode!r}); {READY}sys.stdin.read()"
        process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        self._stack.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        return process


@pytest.fixture
def processes() -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(stack)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of Ray's, with one log."""
    (tmp_path / "ray" / "logs").mkdir(parents=True)
    (tmp_path / "ray" / "logs" / "agent.log").touch()
    return tmp_path / "ray"


def test_a_writer_is_found_and_a_reader_and_the_owner_are_not(processes: Processes, folder: Path) -> None:
    """A user's ``tail -f`` of a log is no part of Ray."""
    log = folder / "logs" / "agent.log"
    agent, owner = processes.start(log, "a"), processes.start(log, "a")
    processes.start(log, "r")
    processes.start(folder.parent / "ray-of-another", "a")
    assert writers_below(folder, owner.pid) == [agent.pid]


@pytest.mark.parametrize("before", ["", STUBBORN])
def test_what_does_not_end_by_itself_is_ended_and_the_folder_goes(
    processes: Processes, folder: Path, before: str
) -> None:
    """Also what will not hear of it."""
    agent = processes.start(folder / "logs" / "agent.log", "a", before)
    sweep(folder, NOBODY, settle_s=0.0, terminate_s=0.2 if before else 10.0)
    assert agent.wait(10) < 0
    assert not folder.exists()


def test_the_sweeper_waits_for_its_owners_end(folder: Path) -> None:
    """However it comes: the closing of the pipe is what tells."""
    command = [sys.executable, "-m", "prefixmesh.fleet.sweeper", str(folder), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as sweeper:
        assert sweeper.poll() is None
        assert folder.exists()
        sweeper.communicate(timeout=20)
    assert sweeper.returncode == 0
    assert not folder.exists()


def test_the_owners_last_word_keeps_the_folder(folder: Path) -> None:
    """For the logs of what failed."""
    command = [sys.executable, "-m", "prefixmesh.fleet.sweeper", str(folder), str(os.getpid())]
    subprocess.run(command, input=KEEP, check=True, timeout=20)
    assert (folder / "logs" / "agent.log").exists()
