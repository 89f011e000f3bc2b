"""A mover around a mover that does what memory and buses do on bad days: jobs begin late and out of order, outcomes come late and out of order,
copies fail, layers do not come in time. Everything by a seed; for tests and simulations, and for any mover.

Its time is *looks*: calls of ``take_done``. What is held back is held for a number of looks, and while anything is held ``on_done`` is called
again at each, so that an idle loop looks again; whoever waits with ``wait_done`` waits all of it out. So a run repeats whatever the machine
does, as far as the mover within repeats.

A failed copy is really copied, and then said to have failed: its destination holds anything, which is what ``spoil`` may make of it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prefixmesh.errors import ConfigError, LoadBackError
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, Mover, Outcome

INJECTED: Final = "injected fault"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoverFaults:
    """What goes wrong, and how often: shares from 0 to 1."""

    fail: float = 0.0
    """Of jobs, that fail."""

    late_outcome: float = 0.0
    """Of jobs, whose outcome is told later than it came."""

    late_start: float = 0.0
    """Of jobs, that begin later than they were started; those behind pass them."""

    late_layer: float = 0.0
    """Of steps that expect something, in which a layer does not come in time. The copy goes on, and may end well."""

    most_looks: int = 8
    """Something late is late by at most so many looks."""

    reorder: bool = True
    """Outcomes of one look come in any order."""

    def __post_init__(self) -> None:
        for name in ("fail", "late_outcome", "late_start", "late_layer"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be a share from 0 to 1, got {getattr(self, name)}")
        if self.most_looks < 1:
            raise ConfigError(f"most_looks must be at least 1, got {self.most_looks}")


class FaultyMover:
    """``Mover`` with faults. One loop calls it."""

    def __init__(
        self,
        inner: Mover,
        num_layers: int,
        faults: MoverFaults,
        rng: random.Random,
        on_done: Callable[[], None] | None = None,
        spoil: Callable[[CopyJob], None] | None = None,
    ) -> None:
        """``inner`` calls an ``on_done`` of its own; this one is called, by the loop's own thread, while something is held back.
        ``spoil`` may write anything to a failed job's destination."""
        self._inner = inner
        self._num_layers = num_layers
        self._faults = faults
        self._rng = rng
        self.on_done = on_done
        self._spoil = spoil
        self._looks = 0
        self._late: list[tuple[int, CopyJob]] = []
        """Jobs that have not begun, and the look at which they do."""
        self._held: list[tuple[int, Outcome]] = []
        """Outcomes, and the look at which they are told."""
        self._doomed: dict[int, int] = {}
        """Jobs that fail, with the layer at which they do."""
        self._jobs: dict[int, CopyJob] = {}
        """All whose outcome was not told."""
        self._breaks_at: int | None = None
        """The layer at which this step fails."""
        self.injected = 0
        """Faults of all kinds; only rises."""

    def __repr__(self) -> str:
        return f"FaultyMover({len(self._late)} not begun, {len(self._held)} held, {self.injected} faults, {self._inner!r})"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._inner.page_bytes

    def start(self, job: CopyJob) -> None:
        """Queue a job, or hold it back."""
        self._jobs[job.number] = job
        if self._happens(self._faults.fail):
            self._doomed[job.number] = self._rng.randrange(self._num_layers)
        if self._happens(self._faults.late_start):
            self._late.append((self._due(), job))
            self._nudge()
        else:
            self._inner.start(job)

    def cancel(self, number: int) -> None:
        """As the mover within; a job that is held back has not begun."""
        for entry in self._late:
            if entry[1].number == number:
                self._late.remove(entry)
                self._held.append((self._looks, Outcome(number, 0.0, CANCELLED)))
                self._nudge()
                return
        self._inner.cancel(number)

    def layers_done(self, number: int) -> int:
        """As the mover within; of a job that fails only those before the fault."""
        if number not in self._jobs or any(job.number == number for _, job in self._late):
            return 0
        done = self._inner_layers(number)
        return min(done, self._doomed.get(number, done))

    def take_done(self) -> list[Outcome]:
        """Outcomes that are due. One look."""
        self._looks += 1
        self._begin(lambda due: due <= self._looks)
        self._collect()
        told = [outcome for due, outcome in self._held if due <= self._looks]
        self._held = [entry for entry in self._held if entry[0] > self._looks]
        if self._faults.reorder:
            self._rng.shuffle(told)
        for outcome in told:
            self._jobs.pop(outcome.number, None)
            self._doomed.pop(outcome.number, None)
        self._nudge()
        return told

    def wait_done(self, at_most_s: float) -> None:
        """Wait out all that is held back; if nothing is, as the mover within."""
        self._begin(lambda _: True)
        self._collect()
        if not self._held:
            self._inner.wait_done(at_most_s)
            self._collect()
        self._held = [(self._looks, outcome) for _, outcome in self._held]

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None:
        """As the mover within; or for a step in which something will be missing."""
        self._begin(lambda _: False, numbers)
        breaks = [self._doomed[number] for number in numbers if number in self._doomed]
        if numbers and self._happens(self._faults.late_layer):
            breaks.append(self._rng.randrange(self._num_layers))
        held = self._outcomes()
        breaks += [0 for number in numbers if number in held and held[number].error not in ("", INJECTED)]
        self._breaks_at = min(breaks, default=None)
        # The mover within knows no more of what it has told the outcome of.
        self._inner.expect([number for number in numbers if number not in held], at_most_s)

    def await_layer(self, layer: int) -> None:
        """As the mover within, up to the layer that does not come."""
        if self._breaks_at is not None and layer >= self._breaks_at:
            raise LoadBackError(f"layer {layer}: {INJECTED}")
        self._inner.await_layer(layer)

    def close(self) -> None:
        """What is held back has no outcome any more."""
        self._late.clear()
        self._held.clear()
        self._inner.close()

    def _begin(self, due: Callable[[int], bool], needed: Sequence[int] = ()) -> None:
        begin = [entry for entry in self._late if due(entry[0]) or entry[1].number in needed]
        self._late = [entry for entry in self._late if entry not in begin]
        for _, job in begin:
            self._inner.start(job)

    def _collect(self) -> None:
        for outcome in self._inner.take_done():
            number = outcome.number
            if number in self._doomed and not outcome.error:
                outcome = outcome._replace(error=INJECTED)
                if self._spoil is not None:
                    self._spoil(self._jobs[number])
            late = self._happens(self._faults.late_outcome)
            self._held.append((self._due() if late else self._looks, outcome))

    def _inner_layers(self, number: int) -> int:
        ended = self._outcomes().get(number)
        if ended is None:
            return self._inner.layers_done(number)
        return self._num_layers if ended.error in ("", INJECTED) else 0

    def _outcomes(self) -> dict[int, Outcome]:
        return {outcome.number: outcome for _, outcome in self._held}

    def _happens(self, share: float) -> bool:
        happens = self._rng.random() < share
        self.injected += happens
        return happens

    def _due(self) -> int:
        return self._looks + self._rng.randint(1, self._faults.most_looks)

    def _nudge(self) -> None:
        if self.on_done is not None and (self._late or self._held):
            self.on_done()
