"""One event loop with a virtual clock: what happens next is what is due first, and time is only a number.

Everything that happens in a simulation is a call that somebody asked for at a time. The kernel makes the calls in the order of their
times, and of those at one time in the order in which they were asked for, so a run with one seed is one run: every fault that was
found once is found again. It knows neither workers nor networks, and never reads a real clock.

The one source of chance is ``rng``. A part that must not change the draws of others takes a source of its own by ``fork_rng``.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

from prefixmesh.errors import InvariantError


class Timer:
    """A call that was asked for; ``cancel`` takes it back."""

    __slots__ = ("_call", "when")

    def __init__(self, when: float, call: Callable[[], Any]) -> None:
        self.when = when
        """Seconds of simulated time."""

        self._call: Callable[[], Any] | None = call

    @property
    def is_due(self) -> bool:
        """Whether it is still to be called."""
        return self._call is not None

    def cancel(self) -> None:
        """Never call it. Called or cancelled already: nothing happens. O(1)."""
        self._call = None

    def take(self) -> Callable[[], Any] | None:
        """What is to be called, once; None when that is over. For the kernel."""
        call, self._call = self._call, None
        return call

    def __repr__(self) -> str:
        return f"<Timer at {self.when:.6f} {'due' if self.is_due else 'over'}>"


class Simulation:
    """The clock, the calls to come, and the chance of one run."""

    def __init__(self, seed: int, start: float = 0.0) -> None:
        self._seed = seed
        self._now = start
        self._queue: list[tuple[float, int, Timer]] = []
        self._asked = 0
        self.rng = random.Random(seed)  # noqa: S311  chance to repeat, not to hide
        self.calls = 0
        """How many have been made."""

    @property
    def now(self) -> float:
        """Seconds of simulated time since the start."""
        return self._now

    def fork_rng(self, name: str) -> random.Random:
        """A source of chance of its own: the same for the same seed and name, whatever others draw."""
        return random.Random(f"{self._seed}/{name}")  # noqa: S311

    def call_at(self, when: float, call: Callable[..., Any], *arguments: Any) -> Timer:
        """Call at a time; one that is past is now. O(log calls to come)."""
        timer = Timer(max(when, self._now), (lambda: call(*arguments)) if arguments else call)
        self._asked += 1
        heapq.heappush(self._queue, (timer.when, self._asked, timer))
        return timer

    def call_later(self, delay_s: float, call: Callable[..., Any], *arguments: Any) -> Timer:
        """Call after a delay; 0 is after all that is due now already. O(log calls to come)."""
        return self.call_at(self._now + delay_s, call, *arguments)

    def step(self) -> bool:
        """Make the next call, and let time be when it is due. False when there is none. What it raises comes out here."""
        while self._queue:
            when, _, timer = heapq.heappop(self._queue)
            call = timer.take()
            if call is not None:
                self._now = when
                self.calls += 1
                call()
                return True
        return False

    def run_until(self, when: float) -> None:
        """Make every call that is due by ``when``, which then is the time."""
        while (due := self.next_due()) is not None and due <= when:
            self.step()
        self._now = max(self._now, when)

    def run_for(self, duration_s: float) -> None:
        """Make every call that is due in the next so many seconds."""
        self.run_until(self._now + duration_s)

    def run_until_idle(self, *, limit: int = 1_000_000) -> None:
        """Make calls until there are none left; InvariantError after ``limit`` of them: something never comes to rest."""
        for _ in range(limit):
            if not self.step():
                return
        raise InvariantError(f"not at rest after {limit} calls: {self!r}")

    def next_due(self) -> float | None:
        """When the next call is due; None when there is none."""
        while self._queue and not self._queue[0][2].is_due:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def __repr__(self) -> str:
        return f"<Simulation seed {self._seed} at {self._now:.6f} s: {self.calls} calls made, {len(self._queue)} to come>"
