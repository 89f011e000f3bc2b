"""One arena for the C heap of a server's process, so that a large message is given back when it has been read.

glibc makes an arena for each thread that allocates at the same time as others, up to eight a core, and gives an arena's memory back to the
system only from its end. gRPC reads a message on whichever of its threads is free, in pieces, so each arena comes to hold as much as the
largest message that ever went through it: measured with bodies of 64 MB that were refused, a worker's front grew from 71 to 289 MB in
twelve of them, and with one arena stood between 119 and 145. Small pieces never meet the lock that threads then share: each thread has a
cache of its own for them, and Python has its own allocator.
"""

import ctypes
from typing import Final

M_ARENA_MAX: Final = -8
"""glibc's number for the setting (``mallopt(3)``)."""

ARENAS: Final = 1


def keep_one_arena() -> bool:
    """Set it for this process; arenas that exist stay. False where the C library has no such setting (not glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_ARENA_MAX, ARENAS))
