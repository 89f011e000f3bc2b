"""Looks at the blocking client's direct streams, and ends those whose worker says nothing any more; what ``rpc.idle_watch`` is to asyncio.

A thread that waits for a message cannot look at the clock, so one thread looks for all of a client's streams. It is there while there are any.
"""

import threading
import time
from typing import Final, Protocol
from weakref import WeakSet

LOOKS_PER_TIMEOUT: Final = 8
"""A silence is noticed at most an eighth late."""

MOST_PAUSE_S: Final = 1.0
LATE_S: Final = 0.5
"""By so much a look is late only where this process itself stood still: what came meanwhile is read first."""


class WatchedCall(Protocol):
    """A stream that is read."""

    def silent_since_s(self) -> float | None:
        """Since when, by ``time.monotonic``, its reader waits for a token that is owed; None where none is."""
        ...

    def end_silent(self, since_s: float) -> None:
        """End the attempt, if its reader still waits since then: whatever has come meanwhile, it is not silent any more."""
        ...


class IdleThread:
    """The streams of one client. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """0 seconds watch nothing."""
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: WeakSet[WatchedCall] = WeakSet()
        """A stream that nobody holds any more is gRPC's to end."""

        self.thread: threading.Thread | None = None
        """The one that looks; None while there is nothing to look at."""

    def watch(self, call: WatchedCall) -> None:
        """Look at ``call`` until it is forgotten. O(1)."""
        if not self.timeout_s:
            return
        with self._lock:
            self._calls.add(call)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="idle-streams", daemon=True)
                self.thread.start()

    def forget(self, call: WatchedCall) -> None:
        """It is over, or goes another way. O(1)."""
        with self._lock:
            self._calls.discard(call)

    def _run(self) -> None:
        pause_s = min(self.timeout_s / LOOKS_PER_TIMEOUT, MOST_PAUSE_S)
        while True:
            due_s = time.monotonic() + pause_s
            time.sleep(pause_s)
            with self._lock:
                calls = list(self._calls)
                if not calls:
                    self.thread = None
                    return
            now_s = time.monotonic()
            if now_s - due_s > LATE_S:
                continue
            for call in calls:
                since_s = call.silent_since_s()
                if since_s is not None and now_s - since_s >= self.timeout_s:
                    call.end_silent(since_s)
            del call, calls
