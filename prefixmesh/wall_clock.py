"""The wall clock in the unit of the wire. Machines disagree about it, so it is compared only with times told by the same machine."""

import time


def unix_ms() -> int:
    """Milliseconds since 1970 by this machine's clock."""
    return time.time_ns() // 1_000_000
