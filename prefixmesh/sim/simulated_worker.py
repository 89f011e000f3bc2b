"""A whole worker in simulated time: its engine is real but for the model, its books are the front's own, its messages travel over a network.

    calls -> front (load, requests by router) -> inbox -> engine: one step after the other, each taking virtual time
                                                            |
    answers <- events, at the step's end <------------------+-> books -> news to each reader

A step is computed at once, and what it did is told when its time is over: nobody can look into an engine while it computes, so nobody can
tell. One ``SimulatedWorker`` is an address; behind it lives one ``Life`` after the other, each with an incarnation, an empty cache and no calls.
"""

import math
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.config import EngineConfig
from prefixmesh.ids import Epoch, Incarnation, RequestId
from prefixmesh.proto.cache_news import News
from prefixmesh.sim.fake_engine import FakeEngine, ModelIdentity, VirtualTime, build_fake_engine
from prefixmesh.sim.faults import FaultKind, FaultScript, FaultsNow
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Stream
from prefixmesh.sim.simulated_news import Newsroom, Place
from prefixmesh.sim.timing import TimingModel
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
    Flush,
    GetStats,
    Refused,
    Stats,
    Submit,
    TokensOut,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One ``Generate`` as it reaches a worker."""

    submit: Submit
    router_id: str
    answer: "Stream[RequestEvent]"
    every_token: bool = True
    """False tells of the first token, and then of the end: fewer messages where nobody reads the others."""


class SimulatedWorker:
    """See the module. ``crash`` and ``start`` may be called at any time; a fault script calls them at its own."""

    def __init__(
        self,
        sim: Simulation,
        name: str,
        config: EngineConfig,
        timing: TimingModel,
        *,
        identity: ModelIdentity | None = None,
        faults: FaultScript | None = None,
    ) -> None:
        self.sim = sim
        self.name = name
        self.config = config
        self.identity = identity or ModelIdentity()
        self._timing = timing
        self._faults = faults or FaultScript()
        self._born = sim.now
        self.rng = sim.fork_rng(f"worker {name}")
        self.life: Life | None = None
        """None while it is down."""

        self.start()
        self._plan_crashes()

    def start(self) -> None:
        """Begin a life; alive already, nothing happens."""
        if self.life is None:
            self.life = Life(self)

    def crash(self) -> None:
        """End the life: its streams break, and what it held is gone."""
        life, self.life = self.life, None
        if life is not None:
            life.end()

    def generate(self, call: Call) -> None:
        """A call has arrived. Nobody there: its answer breaks."""
        if self.life is None:
            call.answer.break_off()
        else:
            self.life.take(call)

    def abort(self, request_id: str) -> None:
        """A caller wants no more of an answer."""
        if self.life is not None:
            self.life.command(Abort(request_id=request_id))

    def flush(self) -> None:
        """Empty the cache, after the step that is being computed."""
        if self.life is not None:
            self.life.command(Flush())

    def watch(
        self, stream: "Stream[News]", resume_from: Place | None, report_interval_s: float, router_id: str
    ) -> None:
        """A reader of the cache's news has come. Nobody there: its stream breaks."""
        if self.life is None:
            stream.break_off()
        else:
            self.life.news.read(stream, resume_from, report_interval_s, router_id)

    def build_engine(self, time: VirtualTime) -> FakeEngine:
        """The engine of a life."""
        engine = build_fake_engine(self.config, self.identity, self._timing, time)
        engine.runner.delay_ms = lambda: self.faults_now().delay_ms
        return engine

    def faults_now(self) -> FaultsNow:
        """What goes wrong at this moment."""
        return self._faults.at(self.sim.now - self._born)

    def _plan_crashes(self) -> None:
        for fault in self._faults.faults:
            if fault.kind is FaultKind.CRASH:
                self.sim.call_at(self._born + fault.at_s, self.crash)
                if fault.until_s < math.inf:
                    self.sim.call_at(self._born + fault.until_s, self.start)

    def __repr__(self) -> str:
        return f"<SimulatedWorker {self.name}: {self.life!r}>"


class _OpenCall:
    """A call that has not ended."""

    __slots__ = ("call", "ends", "has_begun", "place")

    def __init__(self, call: Call, load: FrontLoad) -> None:
        self.call = call
        self.ends = ExitStack()
        self.place: LoadPlace = self.ends.enter_context(
            load.enter(call.router_id, RequestId(call.submit.request_id), 1)
        )
        self.has_begun = False
        """Whether its first token was told."""

        self.place.submitted(count(call.submit.tokens))


class Life:
    """One life of a worker: an engine, its books, and all calls that are open."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._sim = worker.sim
        self._time = VirtualTime(self._sim.now)
        self.incarnation = Incarnation(worker.rng.getrandbits(64))
        self.engine = worker.build_engine(self._time)
        self._publisher = CachePublisher(lambda: Epoch(worker.rng.getrandbits(64)))
        self._load = FrontLoad()
        self.news = Newsroom(
            self._sim, self._publisher, self._load, lambda: self.command(GetStats()), worker.faults_now
        )
        self._inbox: deque[EngineCommand] = deque()
        self._calls: dict[str, _OpenCall] = {}
        self._is_awake = False
        self._is_over = False
        self.busy_s = 0.0
        """Time in which steps were being computed."""

    def take(self, call: Call) -> None:
        """A call has arrived."""
        self._calls[call.submit.request_id] = _OpenCall(call, self._load)
        self.command(call.submit)

    def command(self, command: EngineCommand) -> None:
        """The engine gets a command, which it takes when it is through with its step."""
        self._inbox.append(command)
        if not self._is_awake:
            self._is_awake = True
            self._sim.call_later(0.0, self._round)

    def end(self) -> None:
        """Die: every stream breaks."""
        self._is_over = True
        self.news.close()
        for one in self._calls.values():
            one.call.answer.break_off()

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
        self._sim.call_at(ended, self._tell_all, events)

    def _tell_all(self, events: list[Event]) -> None:
        if self._is_over:
            return
        for event in events:
            self._tell(event)
        self._is_awake = bool(self._inbox) or self.engine.core.has_work
        if self._is_awake:
            self._round()

    def _tell(self, event: Event) -> None:
        match event:
            case CacheChanges():
                apply_changes(event, self._publisher)
                self.news.wake()
            case Stats():
                self.news.figures.answered(event)
            case Admitted() | TokensOut() | Ended() | Refused():
                one = self._calls.get(event.request_id)
                if one is not None:
                    self._answer(one, event)

    def _answer(self, one: _OpenCall, event: RequestEvent) -> None:
        one.place.on_event(0, event)
        match event:
            case Admitted():
                found = self._worker.faults_now().cached_tokens(
                    event.cached_tokens, count(one.call.submit.tokens)
                )
                event = msgspec.structs.replace(event, cached_tokens=found)
            case TokensOut():
                if one.has_begun and not one.call.every_token:
                    return
                one.has_begun = True
            case Ended() | Refused():
                one.ends.close()
                del self._calls[event.request_id]
        one.call.answer.send(event)

    def __repr__(self) -> str:
        return f"<Life {self.incarnation:016x}: {len(self._calls)} calls, {self.engine.scheduler!r}>"
