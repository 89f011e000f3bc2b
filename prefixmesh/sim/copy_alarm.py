"""What wakes an engine by the machine's clock when a copy of its fake mover is over: nobody else would call a mover that does nothing by itself.

In simulated time nobody needs it: ``SimulatedWorker`` asks ``FakeMover.next_due``.
"""

import threading
import time
from collections.abc import Callable


class CopyAlarm:
    """``Alarm`` on a thread of its own, which is there from the first time that is set until ``close``."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """``ring`` is called on the thread, once for each time that was set and not replaced before it came."""
        self._ring = ring
        self._changed = threading.Condition()
        self._when: float | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def set(self, when: float | None) -> None:
        """Ring then, by ``time.monotonic``, and no other time; None never."""
        with self._changed:
            if self._is_closed:
                return
            self._when = when
            if self._thread is None and when is not None:
                self._thread = threading.Thread(target=self._run, name="prefixmesh-copy-alarm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Never ring again, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._is_time():
            self._ring()

    def _is_time(self) -> bool:
        """Wait until it is time to ring; False when it never will be."""
        with self._changed:
            while not self._is_closed:
                left_s = None if self._when is None else self._when - time.monotonic()
                if left_s is not None and left_s <= 0.0:
                    self._when = None
                    return True
                self._changed.wait(left_s)
            return False
