"""One life of a simulated worker: an engine, its books, and the calls that are open. ``simulated_worker`` draws the whole."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from prefixmesh.cache.public import PublicPrefix
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.errors import OverloadedError, PrefixmeshError, UnavailableError, UsedTicketError
from prefixmesh.fleet_secret import SECRET_BYTES, FleetSecret
from prefixmesh.history import History, Released, Taken
from prefixmesh.ids import Epoch, Incarnation, RequestId
from prefixmesh.sim.fake_engine import FakeEngine, VirtualTime
from prefixmesh.sim.faults import FaultsNow, told_tokens
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.network import Stream
from prefixmesh.sim.simulated_news import Newsroom
from prefixmesh.sim.simulated_warming import SimulatedWarming
from prefixmesh.ticket import verify
from prefixmesh.tokens import count
from prefixmesh.worker.cache_watchers import apply_changes
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.front_load import FrontLoad, LoadPlace
from prefixmesh.worker.messages import (
    Abort,
    Admitted,
    CacheChanges,
    Ended,
    EngineCommand,
    Event,
    GetStats,
    Refused,
    Stats,
    Submit,
    TokensOut,
)
from prefixmesh.worker.prefix_messages import PrefixAnswer
from prefixmesh.worker.ticket_gate import TicketGate

SIMULATED_SECRET: Final = FleetSecret(b"s" * SECRET_BYTES)
"""Of every simulated fleet: what is signed is signed for real, and nothing is to be kept from anybody."""

HELD_LOOK_S: Final = 0.05
"""How soon answers that a fault holds up are looked at again."""

_REFUSALS: Final[dict[str, Callable[[str], PrefixmeshError]]] = {
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
}


class CallFailed(NamedTuple):
    """A call's last message where it ends in a status, which the worker itself has sent."""

    error: PrefixmeshError


WorkerMessage: TypeAlias = RequestEvent | CallFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One ``Generate`` as it reaches a worker."""

    submit: Submit
    router_id: str
    answer: "Stream[WorkerMessage]"
    every_token: bool = True
    """False tells of the first token, and then of the end: fewer messages where nobody reads the others."""

    ticket: bytes = b""
    """As it was signed; without one the call is taken in as it is, as workers on loopback do."""


class Surroundings(Protocol):
    """What a life needs of the worker it is of."""

    name: str
    sim: Simulation
    history: History

    def draw(self) -> int:
        """64 bits by chance."""
        ...

    def build_engine(self, time: VirtualTime) -> FakeEngine:
        """The engine of a life."""
        ...

    def faults_now(self) -> FaultsNow:
        """What goes wrong at this moment."""
        ...

    def when_awake(self, call: Callable[[], object]) -> None:
        """Have it done now, or when the worker stands still no longer."""
        ...


class _OpenCall:
    """A call that has not ended."""

    __slots__ = ("call", "ends", "has_begun", "held", "place")

    def __init__(self, call: Call, load: FrontLoad, router_id: str) -> None:
        self.call = call
        self.ends = ExitStack()
        self.place: LoadPlace = self.ends.enter_context(
            load.enter(router_id, RequestId(call.submit.request_id), 1)
        )
        self.has_begun = False
        """Whether its first token was told."""

        self.held: deque[RequestEvent] = deque()
        """What a fault keeps from being told."""

        # As a front counts it, whatever an answer goes on from.
        self.place.submitted(count(call.submit.tokens))


class Life:
    """See the module."""

    def __init__(self, worker: Surroundings) -> None:
        self._worker = worker
        self._sim = worker.sim
        self._time = VirtualTime(self._sim.now)
        self.incarnation = Incarnation(worker.draw())
        self.engine = worker.build_engine(self._time)
        self.publisher = CachePublisher(lambda: Epoch(worker.draw()))
        self.load = FrontLoad()
        self.news = Newsroom(
            self._sim, self.publisher, self.load, lambda: self.command(GetStats()), worker.faults_now
        )
        self.pins = SimulatedWarming(self.command)
        self._gate = TicketGate()
        self._inbox: deque[EngineCommand] = deque()
        self._calls: dict[str, _OpenCall] = {}
        # Those of which a fault holds something up, ended or not.
        self._held_up: dict[_OpenCall, None] = {}  # in order, as a set would not be
        self._others: dict[Stream[Any], None] = {}  # in order, as a set would not be
        self._is_awake = False
        self._is_over = False
        self._alarm: Timer | None = None
        """When it is looked at again though nothing comes: a copy between its tiers has ended by then."""

        self.busy_s = 0.0
        """Time in which steps were being computed."""

    @property
    def open_calls(self) -> int:
        """That have not ended."""
        return len(self._calls)

    def take(self, call: Call) -> None:
        """A call has arrived."""
        try:
            router_id, public = self._admit(call)
        except PrefixmeshError as error:
            call.answer.send(CallFailed(error))
            return
        submit = msgspec.structs.replace(call.submit, public=public) if public else call.submit
        name = call.submit.request_id
        if self._worker.history.is_on:
            self._worker.history.note(Taken, name, worker=self._worker.name, incarnation=self.incarnation)
        self._calls[name] = _OpenCall(call, self.load, router_id)
        call.answer.on_gone = lambda: self._worker.when_awake(lambda: self.abort(name))
        self.command(submit)

    def ends_with(self, answer: "Stream[Any]") -> None:
        """This answer breaks when the life ends before it does."""
        self._others = {one: None for one in self._others if one.is_open}
        self._others[answer] = None

    def abort(self, request_id: str) -> None:
        """A caller wants no more of an answer."""
        if request_id in self._calls:
            self.command(Abort(request_id=request_id))

    def command(self, command: EngineCommand) -> None:
        """The engine gets a command, which it takes when it is through with its step."""
        self._inbox.append(command)
        if not self._is_awake:
            self._is_awake = True
            self._sim.call_later(0.0, self._worker.when_awake, self._round)

    def _look_later(self) -> None:
        """Without a command and without work: look again when a copy has ended, if one is under way."""
        due = self.engine.next_due()
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if due is None else self._sim.call_at(due, self._worker.when_awake, self._look)

    def _look(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._round()

    def end(self) -> None:
        """Die: every stream breaks."""
        self._is_over = True
        if self._alarm is not None:
            self._alarm.cancel()
        self.news.close()
        for one in (*self._calls.values(), *self._held_up):
            one.call.answer.reset()
        for answer in self._others:
            answer.reset()

    def _admit(self, call: Call) -> tuple[str, tuple[PublicPrefix, ...]]:
        """The router that a call comes from, and what is public of its prompt, which only a ticket says. Raises what it is refused with."""
        faults, router_id = self._worker.faults_now(), call.router_id
        public: tuple[PublicPrefix, ...] = ()
        if call.submit.request_id in self._calls:
            raise UsedTicketError("a request of this name is running here")
        if call.ticket:
            ticket = verify(call.ticket, SIMULATED_SECRET, self.incarnation)
            self._gate.admit(ticket, round(1e3 * (self._sim.now + faults.clock_ahead_s)))
            router_id, public = ticket.router_id, ticket.public
        if faults.refusal:
            raise _REFUSALS[faults.refusal]("the worker was told to refuse requests")
        return router_id, public

    def _round(self) -> None:
        """One turn of the engine's loop: the commands that have come, and one step. What came of it is told when its time is over."""
        if self._is_over:
            return
        core, began = self.engine.core, self._sim.now
        self._time.pass_until(began)
        events: list[Event] = []
        while self._inbox:
            events += core.handle(self._inbox.popleft(), began)
        if core.has_work:
            events += core.step(began)
        ended = self._time.now()
        self.busy_s += ended - began
        self._sim.call_at(ended, self._worker.when_awake, lambda: self._tell_all(events))

    def _tell_all(self, events: list[Event]) -> None:
        if self._is_over:
            return
        for event in events:
            self._tell(event)
        self._is_awake = bool(self._inbox) or self.engine.core.has_work
        if self._is_awake:
            self._round()
        else:
            self._look_later()

    def _tell(self, event: Event) -> None:
        match event:
            case CacheChanges():
                apply_changes(event, self.publisher)
                self.news.wake()
            case Stats():
                self.news.figures.answered(event)
            case Admitted() | TokensOut() | Ended() | Refused():
                one = self._calls.get(event.request_id)
                if one is not None:
                    self._on_event(one, event)
                else:
                    self.pins.take(event)
            case PrefixAnswer():
                self.pins.take(event)

    def _on_event(self, one: _OpenCall, event: RequestEvent) -> None:
        """What the engine says of a request: the books know it at once, the caller where no fault holds it up."""
        one.place.on_event(0, event)
        if isinstance(event, Ended | Refused):
            one.ends.close()
            del self._calls[event.request_id]
            if self._worker.history.is_on:
                self._worker.history.note(Released, event.request_id, incarnation=self.incarnation)
        one.held.append(event)
        if len(one.held) == 1:
            self._tell_caller(one)

    def _tell_caller(self, one: _OpenCall) -> None:
        """Tell what may be told."""
        if self._is_over:
            return
        faults, resumed = self._worker.faults_now(), count(one.call.submit.resumed)
        while one.held and told_tokens(one.held[0], resumed) <= faults.stream_stops_at:
            self._answer(one, one.held.popleft(), faults)
        self._held_up.pop(one, None)
        if one.held and one.call.answer.is_open:
            self._held_up[one] = None
            self._sim.call_later(HELD_LOOK_S, self._worker.when_awake, lambda: self._tell_caller(one))

    def _answer(self, one: _OpenCall, event: RequestEvent, faults: FaultsNow) -> None:
        match event:
            case Admitted():
                event = faults.admitted(event, count(one.call.submit.tokens))
            case TokensOut():
                if one.has_begun and not one.call.every_token:
                    return
                one.has_begun = True
            case _:
                pass
        one.call.answer.send(event)

    def __repr__(self) -> str:
        return f"<Life {self.incarnation:016x}: {len(self._calls)} calls, {self.engine.scheduler!r}>"
