"""The engine's loop: take commands, make a step, tell what happened; and sleep when there is nothing to do.

It knows neither threads nor sockets. Where commands come from and where events go are two small interfaces, so the loop of a
thread, of a process and of a test is the same.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from prefixmesh.worker.messages import Command, EngineCommand, Event, Shutdown, Submit

logger = logging.getLogger(__name__)

MAX_INBOX_SUBMITS: Final = 4096
"""Submits that wait for the engine to look, which it does after every step. The engine's own queue is bounded by
``max_queued_requests``; this bounds what arrives during one long step."""

QUIET_S: Final = 0.2
"""Without work and without a command for so long, the engine is idle rather than between two requests: a chat's next question
takes seconds, a program's next call some milliseconds."""


class Core(Protocol):
    """What the loop drives: ``EngineCore``."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def handle(self, command: EngineCommand, now: float) -> list[Event]:
        """Take one command."""
        ...

    def step(self, now: float) -> list[Event]:
        """Compute one step."""
        ...


class Housekeeper(Protocol):
    """What tidies up while nobody waits: ``StepCollector``."""

    def after_step(self) -> None:
        """Called after every round: something short."""
        ...

    def when_idle(self) -> None:
        """Called once in every idle time, after ``QUIET_S`` of it: what would hold up a step."""
        ...


class CommandInbox:
    """Commands on their way to the loop; any thread may put, one loop takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._submits = 0
        self._woken = False
        self._closed = False

    def put(self, command: Command, *, wait: bool = False) -> bool:
        """Add a command; False when too many submits are waiting (never with ``wait``, which blocks until there is room).

        Only submits are bounded: every other command is about a request or a caller that exists already.
        """
        with self._changed:
            if isinstance(command, Submit):
                if wait:
                    self._changed.wait_for(lambda: self._submits < MAX_INBOX_SUBMITS or self._closed)
                elif self._submits >= MAX_INBOX_SUBMITS:
                    return False
                self._submits += 1
            self._commands.append(command)
            self._changed.notify_all()
        return True

    def take(self, *, wait: bool, at_most_s: float | None = None) -> list[Command]:
        """Everything that has arrived, in order; with ``wait``, not before something has, ``wake`` was called or ``at_most_s`` have
        passed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: bool(self._commands) or self._woken, at_most_s)
            self._woken = False
            commands = list(self._commands)
            self._commands.clear()
            self._submits = 0
            self._changed.notify_all()
        return commands

    def wake(self) -> None:
        """Let the loop look for itself what there is to do, as after a copy has ended. Any thread; never blocks for long."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of whoever waits in ``put``: the loop has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def run_engine_loop(
    core: Core,
    inbox: CommandInbox,
    send: Callable[[Sequence[Event]], None],
    clock: Callable[[], float],
    housekeeper: Housekeeper | None = None,
) -> None:
    """Serve until ``Shutdown``. ``send`` gets each round's events together and may block for as long as it dares.

    ``housekeeper`` is told of the moments between steps, when the last one's events are sent already.
    """
    try:
        while True:
            events: list[Event] = []
            for command in _next_commands(core, inbox, housekeeper):
                if isinstance(command, Shutdown):
                    return
                events += core.handle(command, clock())
            if core.has_work:
                events += core.step(clock())
            if events:
                send(events)
            if housekeeper is not None:
                housekeeper.after_step()
    finally:
        inbox.close()


def _next_commands(core: Core, inbox: CommandInbox, housekeeper: Housekeeper | None) -> list[Command]:
    """What has arrived; without work, not before something has, or the loop was woken to look for some."""
    if core.has_work:
        return inbox.take(wait=False)
    if housekeeper is not None:
        commands = inbox.take(wait=True, at_most_s=QUIET_S)
        if commands or core.has_work:
            return commands
        housekeeper.when_idle()
    return inbox.take(wait=True)
