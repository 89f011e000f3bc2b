"""A thread that does one job after the other, from a bounded queue. Made for files: the loop that asks never waits for a disk."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_Job = TypeVar("_Job")


class JobThread(Generic[_Job]):
    """Calls ``run`` with each job, in order; one thread puts them."""

    def __init__(self, name: str, run: Callable[[_Job], None], max_jobs: int) -> None:
        self._run = run
        self._max_jobs = max_jobs
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether ``put`` refuses; one that does not, to the thread that puts, does not until its next ``put``."""
        with self._changed:
            return self._is_closed or len(self._jobs) >= self._max_jobs

    def put(self, job: _Job) -> bool:
        """Queue a job; False when the queue is full or closed."""
        with self._changed:
            if self._is_closed or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def close(self, at_most_s: float, *, finish: bool) -> bool:
        """End after the job that is being done, or with ``finish`` after all that are queued; whether that took no longer than
        ``at_most_s``. Any number of times."""
        with self._changed:
            self._is_closed = True
            if not finish:
                self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(at_most_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                self._run(job)
            except Exception:  # a bug of ours: the next job is another's
                logger.exception("disk.job_failed thread=%s", self._thread.name)
