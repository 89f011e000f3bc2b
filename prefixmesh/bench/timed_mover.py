"""A clock around what copies pages between the tiers."""

from collections import Counter
from collections.abc import Callable, Sequence

from prefixmesh.errors import InternalError
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind, Mover, Outcome


class TimedMover:
    """A mover that knows what it has copied, and how long steps have waited for it."""

    def __init__(self, mover: Mover, clock: Callable[[], float]) -> None:
        self._mover = mover
        self._clock = clock
        self._jobs: dict[int, CopyJob] = {}
        self._started_at: dict[int, float] = {}
        self._joined_at: dict[int, float] = {}
        self.copied_bytes: Counter[CopyKind] = Counter()
        self.copying_s: dict[CopyKind, float] = {"offload": 0.0, "restore": 0.0, "fetch": 0.0}
        self.waited_s = 0.0
        """Steps, for layers that had not come."""

        self._after_joining_s = 0.0

    def rate(self, kind: CopyKind) -> float:
        """Bytes a second while copying. InternalError when nothing was copied."""
        if not self.copying_s[kind]:
            raise InternalError(f"the bench has seen no {kind}")
        return self.copied_bytes[kind] / self.copying_s[kind]

    @property
    def overlapped_s(self) -> float:
        """Of the load-backs' copying, what was done while a step computed with the layers that had come."""
        return max(0.0, self._after_joining_s - self.waited_s)

    @property
    def page_bytes(self) -> int:
        """See ``Mover``, as for all below."""
        return self._mover.page_bytes

    def start(self, job: CopyJob) -> None:
        """Noted until its outcome."""
        self._jobs[job.number] = job
        self._started_at[job.number] = self._clock()
        self._mover.start(job)

    def cancel(self, number: int) -> None:
        """Passed on."""
        self._mover.cancel(number)

    def layers_done(self, number: int) -> int:
        """Passed on."""
        return self._mover.layers_done(number)

    def take_done(self) -> list[Outcome]:
        """Counted, where they are good."""
        done = self._mover.take_done()
        for outcome in done:
            job = self._jobs.pop(outcome.number)
            started_at = self._started_at.pop(outcome.number)
            joined_at = self._joined_at.pop(outcome.number, None)
            if not outcome.error:
                self.copied_bytes[job.kind] += len(job.device_pages) * self.page_bytes
                self.copying_s[job.kind] += outcome.elapsed_s
                if joined_at is not None:
                    self._after_joining_s += max(0.0, outcome.elapsed_s - (joined_at - started_at))
        return done

    def wait_done(self, at_most_s: float) -> None:
        """Passed on."""
        self._mover.wait_done(at_most_s)

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None:
        """Noted, for the first step that reads a job."""
        for number in numbers:
            self._joined_at.setdefault(number, self._clock())
        self._mover.expect(numbers, at_most_s)

    def await_layer(self, layer: int) -> None:
        """Timed."""
        started = self._clock()
        try:
            self._mover.await_layer(layer)
        finally:
            self.waited_s += self._clock() - started

    def close(self) -> None:
        """Passed on."""
        self._mover.close()
