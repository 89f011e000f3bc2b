"""Where requests wait beside the scheduler's queue until they have what they need: a compiled grammar, an adapter's weights.

A request that needs neither goes straight on. Those behind one that waits do not wait with it. An adapter's weights are held from here
to the request's last event, whatever that is.
"""

from collections.abc import Callable, Iterable

from prefixmesh.worker.adapter_desk import AdapterDesk, refuse_nameless
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.grammar_queue import Compiled, GrammarQueue
from prefixmesh.worker.messages import AdapterCommand, Ended, EndReason, Event, Refused, Submit
from prefixmesh.worker.queue_deadlines import queue_deadline
from prefixmesh.worker.scheduler import IN_USE, Scheduler


class Entrance:
    """See the module. The engine's loop calls every method."""

    def __init__(
        self,
        scheduler: Scheduler,
        compile_grammar: Callable[[Submit], AnswerGrammar],
        adapters: AdapterDesk,
        queue_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._grammars = GrammarQueue(compile_grammar)
        self._queue_timeout_s = queue_timeout_s
        self.adapters = adapters

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._grammars) + len(self.adapters)

    @property
    def has_work(self) -> bool:
        """Whether ``collect`` must be called: somebody waits, or a thread reads an adapter."""
        return len(self) > 0 or self.adapters.is_reading

    def submit(self, command: Submit, now: float) -> list[Event]:
        """Let a request in; the events say at once when it is refused."""
        request_id = command.request_id
        if request_id in self._grammars or request_id in self.adapters:
            return [Refused(request_id=request_id, field="request_id", problem=IN_USE)]
        if command.adapter and not self.adapters.knows(command.adapter):
            return [refuse_nameless(request_id)]
        if command.sampling.has_grammar:
            self._grammars.begin(command, now)
            return []
        self._go_on(command, now, None)
        return self.take_events()

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End a request in whatever state it is; unknown ids are ignored."""
        if not self._forget(request_id):
            self._scheduler.abort(request_id, now)
            return self.take_events()
        return [_never_began(request_id, "aborted"), *self.take_events()]

    def handle(self, command: AdapterCommand) -> list[Event]:
        """Take a command about adapters."""
        self.adapters.handle(command)
        return self.take_events()

    def collect(self, now: float, wait_s: float) -> list[Event]:
        """Send on what is ready now, and end what has waited too long; waits at most ``wait_s`` for the first."""
        events: list[Event] = [self._timed_out(command) for command in self._late(now)]
        if len(self._grammars):
            for ready in self._grammars.take_ready(0.0 if self.adapters.is_reading else wait_s):
                if isinstance(ready, Compiled):
                    self._go_on(ready.command, ready.arrived_at, ready.grammar)
                else:
                    events.append(ready)
        if self.adapters.is_reading:
            self.adapters.collect(wait_s)
        return events + self.take_events()

    def take_events(self) -> list[Event]:
        """What happened, the scheduler's events among it. Who has ended gives its adapter back, which lets others go on."""
        events: list[Event] = []
        while True:
            resident: list[Event] = []
            for waiting in self.adapters.take_ready():
                if waiting.command.tokens:
                    self._scheduler.submit(*waiting)
                else:  # it is there, and nothing else was wanted
                    resident.append(_never_began(waiting.command.request_id, "length"))
            told = resident + self._scheduler.take_events() + self.adapters.take_events()
            if not told:
                return events
            events += told
            for event in told:
                if isinstance(event, Ended | Refused) and event.request_id in self.adapters:
                    self.adapters.leave(event.request_id)

    def _go_on(self, command: Submit, arrived_at: float, grammar: AnswerGrammar | None) -> None:
        if command.adapter:
            self.adapters.enter(command, arrived_at, grammar)
        else:
            self._scheduler.submit(command, arrived_at, grammar)

    def _forget(self, request_id: str) -> bool:
        """Let go of a request that waits here; whether one did."""
        if self.adapters.waits(request_id):
            self.adapters.leave(request_id)
            return True
        return self._grammars.forget(request_id)

    def _late(self, now: float) -> list[Submit]:
        waiting: Iterable[tuple[Submit, float]] = [
            *self._grammars.waiting(),
            *((waiting.command, waiting.arrived_at) for waiting in self.adapters.waiting()),
        ]
        return [
            command
            for command, arrived_at in waiting
            if now >= queue_deadline(arrived_at, command.queue_timeout_s, self._queue_timeout_s)
        ]

    def _timed_out(self, command: Submit) -> Ended:
        self._forget(command.request_id)
        return _never_began(command.request_id, "queue_timeout")


def _never_began(request_id: str, reason: EndReason) -> Ended:
    return Ended(
        request_id=request_id,
        reason=reason,
        completion_tokens=0,
        prefill_ms=0.0,
        first_token_ms=0.0,
        decode_ms=0.0,
    )
