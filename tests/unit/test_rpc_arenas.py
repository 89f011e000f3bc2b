"""The C library takes the setting, where it is glibc."""

import os
import subprocess
import sys

import pytest

from prefixmesh.rpc.arenas import keep_one_arena

IS_GLIBC = (
    os.confstr("CS_GNU_LIBC_VERSION") is not None if "CS_GNU_LIBC_VERSION" in os.confstr_names else False
)

IN_A_PROCESS_OF_ITS_OWN = """
import ctypes, threading
from prefixmesh.rpc.arenas import keep_one_arena

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if {asked}: keep_one_arena()
together = threading.Barrier(8)

def allocate():
    together.wait()
    for _ in range(200):
        libc.malloc(60_000)

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.malloc_stats()
"""


def arenas(*, asked: bool) -> int:
    """How many arenas a process has in which eight threads have allocated."""
    code = IN_A_PROCESS_OF_ITS_OWN.format(asked=asked)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stderr.count("Arena ")


@pytest.mark.skipif(not IS_GLIBC, reason="not glibc, which alone has arenas")
def test_threads_share_one_arena_where_it_was_asked_for() -> None:
    """And have several where not, or this test would prove nothing."""
    assert arenas(asked=True) == 1
    assert arenas(asked=False) > 1


def test_what_is_not_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library without the setting is no error."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert keep_one_arena() is False
