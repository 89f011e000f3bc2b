"""Coroutines in simulated time: what the real shell awaits of a store (``router.state_lease``, ``router.pins.acting_lease``) runs here without a loop.

A coroutine goes on whenever what it waits for, a ``Reply``, has come. Nothing else may be awaited: what needs asyncio raises at once.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from prefixmesh.sim.kernel import Simulation

Value = TypeVar("Value")


class Reply(Generic[Value]):
    """Something that comes later, once: a value or an error. One coroutine may wait for it."""

    def __init__(self) -> None:
        self._value: list[Value] = []
        self._error: Exception | None = None
        self._go_on: Callable[[], object] | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has come."""
        return bool(self._value) or self._error is not None

    def give(self, value: Value) -> None:
        """It is this. Here already: nothing happens."""
        if not self.is_here:
            self._value.append(value)
            self._tell()

    def fail(self, error: Exception) -> None:
        """It does not come, and whoever waits is raised this."""
        if not self.is_here:
            self._error = error
            self._tell()

    def then(self, go_on: Callable[[], object]) -> None:
        """Call this once it is here; for ``Task``."""
        self._go_on = go_on

    def _tell(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()

    def __await__(self) -> Generator["Reply[Value]", None, Value]:
        if not self.is_here:
            yield self
        if self._error is not None:
            raise self._error
        return self._value[0]


class Task:
    """A coroutine that runs: at once as far as it gets, and on as what it waits for comes. What it raises comes out of the simulation."""

    def __init__(self, coroutine: Coroutine[Reply[Any], None, object]) -> None:
        self._coroutine = coroutine
        self.is_over = False
        self._go_on()

    def cancel(self) -> None:
        """End it where it waits."""
        if not self.is_over:
            self.is_over = True
            self._coroutine.close()

    def _go_on(self) -> None:
        if self.is_over:
            return
        try:
            reply = self._coroutine.send(None)
        except StopIteration:
            self.is_over = True
        except BaseException:
            self.is_over = True
            raise
        else:
            reply.then(self._go_on)


def pause(sim: Simulation, duration_s: float) -> Reply[None]:
    """To be awaited: comes after so long."""
    reply = Reply[None]()
    sim.call_later(duration_s, reply.give, None)
    return reply
