"""A mover that does what a test says: copies between the fake model's slots and slots of its own, when it is told to.

A copy reads and writes at its end, not at its beginning: what had to stay as it was until then is seen to have stayed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from prefixmesh.errors import LoadBackError
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, CopyKind, Outcome
from tests.support.fake_model import FakeModel, Slot

LAYERS = 2

Content = tuple[Slot | None, bytes | None]


class ScriptedMover:
    """``Mover``. Jobs of a kind in ``holds`` wait for ``finish``, ``arrive`` or ``fail``; all others are over as soon as they begin."""

    page_bytes = 256

    def __init__(self, model: FakeModel, page_size: int, host_pages: int) -> None:
        self._model = model
        self._page_size = page_size
        self._host: list[Content] = [(None, None)] * (host_pages * page_size)
        self.holds: set[CopyKind] = set()
        self.elapsed_s = 0.001
        """Of each copy."""

        self.jobs: dict[int, CopyJob] = {}
        """All that were started and have not ended."""

        self.begun: set[int] = set()
        """Those of them that cannot be cancelled any more."""

        self.started: list[CopyJob] = []
        self.cancelled: list[int] = []
        self.arriving: set[int] = set()
        """Those whose first layer is there; their last one comes when a step asks for it."""

        self.never_comes: set[int] = set()
        """Of those, the ones whose last layer does not come in time."""

        self.told: str = ""
        """What goes wrong at the very end of those that a step has asked for."""

        self.on_wait: Callable[[float], None] = lambda at_most_s: None
        self.closed = False
        self._expected: list[int] = []
        self._done: list[Outcome] = []

    def start(self, job: CopyJob) -> None:
        self.jobs[job.number] = job
        self.started.append(job)
        if job.kind not in self.holds:
            self.finish(job.number)

    def finish(self, number: int | None = None, error: str = "") -> None:
        """End a job well, or all; with ``error``, copy and say that it went wrong."""
        for which in list(self.jobs) if number is None else [number]:
            job = self.jobs.pop(which)
            if job.kind == "fetch":
                self._fill(job)
                self._done.append(Outcome(which, self.elapsed_s, error))
                continue
            for slot, host in self._slots(job):
                if job.kind == "offload":
                    self._host[host] = self._model._slots[slot], self._model._namespaces[slot]
                else:
                    self._model._slots[slot], self._model._namespaces[slot] = self._host[host]
            self._done.append(Outcome(which, self.elapsed_s, error))

    def fail(self, number: int, error: str = "broken") -> None:
        """End a job badly: its destination holds nobody's KV."""
        job = self.jobs.pop(number)
        if job.kind == "fetch":
            self._fill(replace(job, buffer=[[(None, None)] * self._page_size] * len(job.device_pages)))
        for slot, host in self._slots(job) if job.kind != "fetch" else ():
            if job.kind == "offload":
                self._host[host] = None, None
            else:
                self._model._slots[slot] = None
        self._done.append(Outcome(number, 0.0, error))

    def arrive(self, number: int) -> None:
        """Its first layer is there."""
        self.arriving.add(number)

    def of_kind(self, kind: CopyKind) -> list[CopyJob]:
        """The jobs under way."""
        return [job for job in self.jobs.values() if job.kind == kind]

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        if number in self.jobs and number not in self.begun | self.arriving:
            self.fail(number, CANCELLED)

    def layers_done(self, number: int) -> int:
        return 1 if number in self.arriving else 0

    def take_done(self) -> list[Outcome]:
        done, self._done = self._done, []
        return done

    def wait_done(self, at_most_s: float) -> None:
        if not self._done:
            self.on_wait(at_most_s)

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None:
        self._expected = list(numbers)

    def await_layer(self, layer: int) -> None:
        for number in self._expected:
            if number in self.jobs:
                if number not in self.arriving or number in self.never_comes:
                    raise LoadBackError(f"job {number} does not come")
                self.finish(number, self.told)

    def close(self) -> None:
        self.closed = True

    def host_page(self, page: int) -> list[Content]:
        """What a page of the host holds, slot by slot: a page of a fetch's buffer is such a list."""
        return self._host[page * self._page_size : (page + 1) * self._page_size]

    def _fill(self, job: CopyJob) -> None:
        for page, held in zip(job.device_pages.tolist(), job.buffer, strict=True):
            for offset, content in enumerate(held):
                slot = page * self._page_size + offset
                self._model._slots[slot], self._model._namespaces[slot] = content

    def _slots(self, job: CopyJob) -> Iterator[tuple[int, int]]:
        assert job.host_pages is not None
        for device, host in zip(job.device_pages.tolist(), job.host_pages.tolist(), strict=True):
            for offset in range(self._page_size):
                yield device * self._page_size + offset, host * self._page_size + offset
