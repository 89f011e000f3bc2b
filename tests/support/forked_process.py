"""A program of ours as a process of its own, begun within a fraction of a second: what takes seconds to import was imported before.

A server process imports it once and forks for each program (``multiprocessing``'s forkserver), before any gRPC runs in it. What is begun is
as real as any other process: its own pid, sockets and signals, and the end that ``python -m`` would come to. Where it is measured how long
a program takes to begin, this is no way to begin it.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

PRELOADED: Final = ("prefixmesh.sim.fake_worker",)

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))


class ForkedProcess:
    """What a test needs of ``subprocess.Popen``, for ``python -m MODULE ARGUMENTS``. ``stderr`` is appended to."""

    def __init__(self, module: str, arguments: Sequence[str], stderr: Path) -> None:
        reader, writer = _CONTEXT.Pipe(duplex=False)
        # Not a daemon: a program may have processes of its own.
        self._process = _CONTEXT.Process(target=_run, args=(module, tuple(arguments), str(stderr), writer))
        self._process.start()
        writer.close()
        self.stdout: IO[bytes] = os.fdopen(os.dup(reader.fileno()), "rb", buffering=0)
        reader.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """A signal to it; it has ended: nothing happens."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, when it has ended."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"{self.pid} still runs after {timeout_s} s"
        return code


def _run(
    module: str, arguments: Sequence[str], stderr: str, stdout: "multiprocessing.connection.Connection"
) -> None:
    """In the new process: be the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks ignores it
    with open(stderr, "ab") as log:
        os.dup2(stdout.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stdout.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
