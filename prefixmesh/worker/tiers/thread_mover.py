"""Copies KV pages on a thread of its own, so that the loop that computes only asks: ``Mover`` over any ``PageCopies``.

One thread, because one core's copying is nearly all that memory gives, and the others belong to the model. Load-backs go before
offloads, also in the middle of an offload: somebody waits for the one, nobody for the other. The thread never dies of a copy: whatever
goes wrong is the job's outcome.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, Outcome
from prefixmesh.worker.tiers.layer_gate import CLOSED, Arriving, LayerGate
from prefixmesh.worker.tiers.page_copies import Fence, PageCopies

logger = logging.getLogger(__name__)

CLOSE_WAIT_S: Final = 10.0
"""For the piece that is being copied when the mover is closed: milliseconds, unless the device hangs, which must not keep a worker from
ending."""


@dataclass(slots=True)
class _Task:
    job: CopyJob
    fence: Fence
    arriving: Arriving
    copied_s: float = 0.0
    ended_well: bool = False


@dataclass(slots=True)
class _Lines:
    """What waits for its turn."""

    bring: deque[_Task] = field(default_factory=deque)
    offload: deque[_Task] = field(default_factory=deque)

    def pop(self) -> _Task | None:
        line = self.bring or self.offload
        return line.popleft() if line else None

    def remove(self, task: _Task) -> bool:
        for line in (self.bring, self.offload):
            if task in line:
                line.remove(task)
                return True
        return False


class ThreadMover:
    """``Mover`` by a thread. Its methods are one loop's, but for ``close``; ``on_done`` is called on the mover's thread."""

    def __init__(
        self,
        copies: PageCopies,
        on_done: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``on_done`` is called after each outcome; it must not block."""
        self._copies = copies
        self.on_done = on_done
        self._clock = clock
        self._gate = LayerGate(copies.join)
        self._changed = threading.Condition()
        self._lines = _Lines()
        self._tasks: dict[int, _Task] = {}
        """All whose outcome was not taken yet."""

        self._done: list[Outcome] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        with self._changed:
            waiting = len(self._lines.bring) + len(self._lines.offload)
            return f"ThreadMover({len(self._tasks)} jobs, {waiting} not begun, {len(self._done)} outcomes)"

    @property
    def page_bytes(self) -> int:
        """Of one page, all layers' keys and values."""
        return self._copies.page_bytes

    def start(self, job: CopyJob) -> None:
        """Queue a job. O(1). Whatever is wrong with it is its outcome."""
        task = _Task(job, None, Arriving(job.number))
        try:
            task.fence = self._copies.fence()
        except Exception as error:  # the device's: the copy fails, and the step will tell
            self._end(task, _words(error))
            return
        with self._changed:
            if not self._closed:
                self._tasks[job.number] = task
                line = self._lines.offload if job.kind == "offload" else self._lines.bring
                line.append(task)
                self._changed.notify_all()
                return
        self._end(task, CLOSED)

    def cancel(self, number: int) -> None:
        """Do not begin a job that has not begun. O(jobs)."""
        with self._changed:
            task = self._tasks.get(number)
            if task is None or not self._lines.remove(task):
                return
        self._end(task, CANCELLED)

    def layers_done(self, number: int) -> int:
        """How many layers of a restore or fetch are on the device. O(layers)."""
        with self._changed:
            task = self._tasks.get(number)
        if task is None or task.job.kind == "offload" or task.arriving.error:
            return 0
        marks = task.arriving.marks
        if task.ended_well:
            return len(marks)
        done = 0
        while done < len(marks) and self._copies.reached(marks[done]):
            done += 1
        return done

    def take_done(self) -> list[Outcome]:
        """Outcomes since the last call, in the order in which the jobs ended."""
        with self._changed:
            done, self._done = self._done, []
            for outcome in done:
                self._tasks.pop(outcome.number, None)
        return done

    def wait_done(self, at_most_s: float) -> None:
        """Block until there is an outcome to take, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done) or self._closed, at_most_s)

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None:
        """What the next step reads. A job that is not known any more fails the step."""
        with self._changed:
            tasks = [self._tasks.get(number) for number in numbers]
        jobs = [
            _unknown(number) if task is None else task.arriving
            for number, task in zip(numbers, tasks, strict=True)
        ]
        self._gate.expect(jobs, at_most_s)

    def await_layer(self, layer: int) -> None:
        """Block until what is expected has come for a layer; LoadBackError when it failed or the time was up."""
        self._gate.await_layer(layer)

    def close(self) -> None:
        """End after the piece that is being copied. Any thread, any number of times; not from ``on_done``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._gate.close()
        self._thread.join(CLOSE_WAIT_S)
        if self._thread.is_alive():
            logger.error("kv_mover.not_ended waited_s=%.0f", CLOSE_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lines.bring or self._lines.offload)
                task = None if self._closed else self._lines.pop()
            if task is None:
                break
            self._copy(task)
        self._copies.close()

    def _copy(self, task: _Task) -> None:
        """Copy a job to its end, which is its outcome, whatever happens."""
        kind = task.job.kind
        try:
            self._copies.pass_fence(task.fence)
            pieces: Iterator[object] = (
                self._copies.offload(task.job) if kind == "offload" else self._copies.bring(task.job)
            )
            while self._piece(task, pieces):
                if kind == "offload":
                    self._let_pass()
                if self._closed:
                    return
        except (
            Exception
        ) as error:  # whatever a device or a bad index raises: the job failed, and the next one is served
            logger.warning("kv_mover.copy_failed job=%d kind=%s error=%s", task.job.number, kind, error)
            self._end(task, _words(error))
        else:
            self._end(task)

    def _piece(self, task: _Task, pieces: Iterator[object]) -> bool:
        """Copy the next piece; False at the end."""
        began = self._clock()
        try:
            mark = next(pieces)
        except StopIteration:
            return False
        finally:
            task.copied_s += self._clock() - began
        if task.job.kind != "offload":
            self._gate.arrived(task.arriving, mark)
        return True

    def _let_pass(self) -> None:
        """Copy what was to be brought to the device meanwhile."""
        while True:
            with self._changed:
                if self._closed or not self._lines.bring:
                    return
                task = self._lines.bring.popleft()
            self._copy(task)

    def _end(self, task: _Task, error: str = "") -> None:
        if error:
            self._gate.failed(task.arriving, error)
        with self._changed:
            task.ended_well = not error
            self._done.append(Outcome(task.job.number, 0.0 if error == CANCELLED else task.copied_s, error))
            self._changed.notify_all()
        if self.on_done is not None:
            try:
                self.on_done()
            except Exception:  # another's: no reason to copy nothing any more
                logger.exception("kv_mover.on_done_failed")


def _unknown(number: int) -> Arriving:
    job = Arriving(number)
    job.error = "the mover knows no such job"
    return job


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
