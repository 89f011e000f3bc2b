"""A ``Mover`` over the numbers in slots that are a fake model's KV: bytes are really copied, in the time of an ``EngineTime``.

A token's number is as many pieces as the fake model has layers, and a copy moves one layer's pieces after the other, each at a moment drawn
within the layer's part of the copy. So pages that are read before they have come, given to somebody else while they are written, or written
over while they are still read give numbers that are nobody's, and a wrong answer (``fake_model``).

As with ``ThreadMover`` one copy goes after the other, and what comes to the device goes before what leaves it. Nothing happens by itself:
whoever calls finds done what was due by then, and ``next_due`` says until when nobody needs to call.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import InternalError, LoadBackError
from prefixmesh.sim.copy_troubles import CopyTrouble, Troubles, no_troubles
from prefixmesh.sim.fake_model import LAYERS, Chains, EngineTime, kv_slots
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, Outcome

Pieces = npt.NDArray[np.uint16]
"""Numbers by page, slot and layer: [pages, page_size, LAYERS]."""

_MS_PER_S: Final = 1e3


class Alarm(Protocol):
    """Who is to wake the mover's caller: ``CopyAlarm``."""

    def set(self, when: float | None) -> None:
        """Do it then, and no other time; None never."""
        ...

    def close(self) -> None:
        """Never do it again."""
        ...


class _Copy:
    """A job, and how far it is."""

    __slots__ = ("error", "has_begun", "job", "layers_done")

    def __init__(self, job: CopyJob) -> None:
        self.job = job
        self.has_begun = False
        self.layers_done = 0
        self.error = ""

    def __repr__(self) -> str:
        state = self.error or f"{self.layers_done} of {LAYERS} layers"
        return f"<_Copy {self.job.number} {self.job.kind} of {len(self.job.device_pages)} pages, {state}>"


class FakeMover:
    """See the module. One loop calls it, as any ``Mover``."""

    def __init__(
        self,
        kv: Chains,
        *,
        page_size: int,
        host_pages: int,
        page_bytes: int,
        ms_per_token: Callable[[CopyJob], float],
        time: EngineTime,
        rng: Random,
        alarm: Alarm | None = None,
    ) -> None:
        """``kv`` are the device's numbers, by slot. ``page_bytes`` is told to whoever asks, of a model of some size. ``alarm`` is told of
        ``next_due`` whenever that may have changed."""
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._ms_per_token = ms_per_token
        self._time = time
        self._rng = rng
        self._alarm = alarm
        self._host = _pieces(kv_slots(host_pages * page_size), page_size)
        self._device = _pieces(kv, page_size)
        self._copies: dict[int, _Copy] = {}
        """All that were started and whose outcome nobody has taken."""

        self._at_work: _Copy | None = None
        self._to_device: deque[_Copy] = deque()
        self._to_host: deque[_Copy] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ends: list[float] = []
        """When the ends of copies that have begun are told."""

        self._asked = 0
        self._done: list[Outcome] = []
        self._expected: list[int] = []
        self._patience_s = 0.0
        self.troubles: Troubles = no_troubles
        """Asked of every copy that begins."""

    @property
    def page_bytes(self) -> int:
        """See ``Mover.page_bytes``."""
        return self._page_bytes

    @property
    def expects(self) -> bool:
        """Whether the next step reads what is being copied."""
        return bool(self._expected)

    def read_host(self, pages: PageIndices) -> bytes:
        """The numbers of pages of the host, as they lie there. O(pages)."""
        return self._host[pages].tobytes()

    def next_due(self) -> float | None:
        """When there is an outcome to take; None while no copy is under way. O(1)."""
        if self._done:
            return self._time.now()
        return self._ends[0] if self._ends else None

    def start(self, job: CopyJob) -> None:
        """See ``Mover.start``."""
        if job.number in self._copies:
            raise InternalError(f"copy {job.number} was started twice")
        self.catch_up()
        copy = self._copies[job.number] = _Copy(job)
        self._line(job).append(copy)
        if self._at_work is None:
            self._begin_next(self._time.now())
        self._set_alarm()

    def cancel(self, number: int) -> None:
        """See ``Mover.cancel``."""
        self.catch_up()
        copy = self._copies.get(number)
        if copy is None or copy.has_begun or copy.error:
            return
        self._line(copy.job).remove(copy)
        copy.error = CANCELLED
        self._done.append(Outcome(number, 0.0, CANCELLED))
        self._set_alarm()

    def layers_done(self, number: int) -> int:
        """See ``Mover.layers_done``."""
        self.catch_up()
        copy = self._copies.get(number)
        return 0 if copy is None or copy.error else copy.layers_done

    def take_done(self) -> list[Outcome]:
        """See ``Mover.take_done``."""
        self.catch_up()
        done, self._done = self._done, []
        for outcome in done:
            del self._copies[outcome.number]
        if done:
            self._set_alarm()
        return done

    def wait_done(self, at_most_s: float) -> None:
        """See ``Mover.wait_done``."""
        end = self._time.now() + at_most_s
        self.catch_up()
        while not self._done and self._time.now() < end:
            self._pass_until(min(end, self._events[0][0]) if self._events else end)

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None:
        """See ``Mover.expect``."""
        self._expected, self._patience_s = list(numbers), at_most_s

    def await_layer(self, layer: int) -> None:
        """See ``Mover.await_layer``."""
        self.catch_up()
        for number in self._expected:
            self._await_layer(number, layer)

    def close(self) -> None:
        """See ``Mover.close``."""
        self._copies.clear()
        self._events.clear()
        self._ends.clear()
        self._done.clear()
        self._expected.clear()
        self._to_device.clear()
        self._to_host.clear()
        self._at_work = None
        if self._alarm is not None:
            self._alarm.close()

    def catch_up(self) -> None:
        """Do what was due by now. O(what that is)."""
        now = self._time.now()
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()

    def _await_layer(self, number: int, layer: int) -> None:
        while True:
            copy = self._copies.get(number)
            if copy is None or copy.error:
                raise LoadBackError(f"{copy or number}: what a step was to read did not come")
            if copy.layers_done > layer:
                return
            now = self._time.now()
            # One that has not begun waits for another, so there is always something to come.
            waits_s = max(0.0, self._events[0][0] - now)
            if waits_s > self._patience_s:
                self._pass_until(now + self._patience_s)
                self._patience_s = 0.0
                raise LoadBackError(f"{copy!r}: layer {layer} did not come in time")
            self._patience_s -= waits_s
            self._pass_until(now + waits_s)

    def _pass_until(self, when: float) -> None:
        self._time.pass_until(when)
        self.catch_up()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.set(self.next_due())

    def _line(self, job: CopyJob) -> deque[_Copy]:
        return self._to_host if job.kind == "offload" else self._to_device

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._asked += 1
        heapq.heappush(self._events, (when, self._asked, act))

    def _begin_next(self, now: float) -> None:
        """Plan the whole of the copy that is next, if there is any: layer after layer, then its end."""
        line = self._to_device or self._to_host
        self._at_work = copy = line.popleft() if line else None
        if copy is None:
            return
        job, trouble = copy.job, self.troubles(copy.job)
        takes_s = self._takes_s(job, trouble)
        copy.has_begun = True
        layers = int(LAYERS * trouble.fails_after) if trouble.error else LAYERS
        for layer in range(layers):
            moved, came = (now + takes_s * (layer + part) / layers for part in (self._rng.random(), 1.0))
            self._at(moved, partial(self._move, job, layer))
            self._at(came, partial(self._has_come, copy, layer))
        over = now + takes_s
        self._at(over, partial(self._end, copy, trouble, Outcome(job.number, takes_s, trouble.error), over))
        heapq.heappush(self._ends, over + trouble.told_late_s)

    def _takes_s(self, job: CopyJob, trouble: CopyTrouble) -> float:
        tokens = len(job.device_pages) * self._page_size
        whole_s = tokens * self._ms_per_token(job) / _MS_PER_S + trouble.slow_s
        return whole_s * trouble.fails_after if trouble.error else whole_s

    def _has_come(self, copy: _Copy, layer: int) -> None:
        copy.layers_done = layer + 1

    def _move(self, job: CopyJob, layer: int) -> None:
        """Copy one layer's pieces of all pages."""
        match job.kind:
            case "offload":
                self._host[job.host_pages, :, layer] = self._device[job.device_pages, :, layer]
            case "restore":
                self._device[job.device_pages, :, layer] = self._host[job.host_pages, :, layer]
            case "fetch":
                self._device[job.device_pages, :, layer] = _pieces(job.buffer, self._page_size)[:, :, layer]

    def _end(self, copy: _Copy, trouble: CopyTrouble, outcome: Outcome, now: float) -> None:
        """Nothing touches its pages any more, which may be told later."""
        if trouble.error:
            self._spoil(copy.job)
            copy.error = trouble.error
        self._at(now + trouble.told_late_s, partial(self._tell, outcome))
        self._begin_next(now)

    def _spoil(self, job: CopyJob) -> None:
        """The destination of a failed copy holds anything."""
        anything = np.uint16(self._rng.randrange(1 << 16))
        if job.kind == "offload":
            self._host[job.host_pages] = anything
        else:
            self._device[job.device_pages] = anything

    def _tell(self, outcome: Outcome) -> None:
        heapq.heappop(self._ends)
        self._done.append(outcome)

    def __repr__(self) -> str:
        waiting = len(self._to_device) + len(self._to_host)
        return f"<FakeMover {len(self._copies)} copies, {waiting} of them not begun, {len(self._done)} told>"


def _pieces(numbers: Chains, page_size: int) -> Pieces:
    """The same memory, by page, slot and layer."""
    return numbers.reshape(-1).view(np.uint16).reshape(-1, page_size, LAYERS)
