"""A whole worker in simulated time: its engine is real but for the model, its books are the front's own, its messages travel over a network.

    calls -> front (load, requests by router) -> inbox -> engine: one step after the other, each taking virtual time
                                                            |
    answers <- events, at the step's end <------------------+-> books -> news to each reader

A step is computed at once, and what it did is told when its time is over: nobody can look into an engine while it computes, so nobody can
tell. One ``SimulatedWorker`` is an address; behind it lives one ``Life`` after the other, each with an incarnation, an empty cache and no calls.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from prefixmesh.config import EngineConfig
from prefixmesh.history import NO_HISTORY, Began, History
from prefixmesh.ids import Incarnation
from prefixmesh.proto.cache_news import News
from prefixmesh.sim.copy_troubles import scripted_troubles
from prefixmesh.sim.fake_engine import FakeEngine, ModelIdentity, VirtualTime, build_fake_engine
from prefixmesh.sim.faults import FaultKind, FaultScript, FaultsNow
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Stream
from prefixmesh.sim.simulated_life import Call, Life
from prefixmesh.sim.simulated_news import Place
from prefixmesh.sim.simulated_warming import SimulatedWarming
from prefixmesh.sim.timing import TimingModel
from prefixmesh.worker.messages import EngineInfo, Flush, Stats


class Description(NamedTuple):
    """What a worker tells of itself when it is asked."""

    incarnation: Incarnation
    info: EngineInfo
    stats: Stats
    clock_s: float
    """What its clock says."""


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
        history: History = NO_HISTORY,
    ) -> None:
        """``history`` is told what the worker takes in and releases."""
        self.sim = sim
        self.name = name
        self.config = config
        self.identity = identity or ModelIdentity()
        self.history = history
        self._timing = timing
        self._faults = faults or FaultScript()
        self._born = sim.now
        self.rng = sim.fork_rng(f"worker {name}")
        self.life: Life | None = None
        """None while it is down."""

        self._held: list[Callable[[], object]] | None = None
        # What has come since it stands still, in its order; None while it does not.
        self.start()
        self._plan_faults()

    def start(self) -> None:
        """Begin a life; alive already, nothing happens."""
        if self.life is None:
            if self.history.is_on:
                self.history.note(Began, self.name)
            self.life = Life(self)

    def crash(self) -> None:
        """End the life: its streams break, and what it held is gone."""
        life, self.life = self.life, None
        if life is not None:
            life.end()
        self.go_on()  # what has come while it stood still finds nobody

    def stall(self) -> None:
        """Stand still, as after SIGSTOP: nothing is done and nothing answered, and nothing of what comes is lost."""
        if self._held is None and self.life is not None:
            self._held = []

    def go_on(self) -> None:
        """Stand still no longer, and do first what has come meanwhile."""
        held, self._held = self._held, None
        for call in held or ():
            call()

    def when_awake(self, call: Callable[[], object]) -> None:
        """Have it done now, or when the worker stands still no longer."""
        if self._held is None:
            call()
        else:
            self._held.append(call)

    def generate(self, call: Call) -> None:
        """A call has arrived. Nobody there: its answer breaks."""

        def take() -> None:
            if self.life is None:
                call.answer.reset()
            elif call.answer.is_open:
                self.life.take(call)

        self.when_awake(take)

    def abort(self, request_id: str) -> None:
        """A caller wants no more of an answer."""
        self.when_awake(lambda: None if self.life is None else self.life.abort(request_id))

    def describe(self, answer: "Stream[Description]") -> None:
        """Somebody asks who is there."""
        self.when_awake(lambda: answer.reset() if self.life is None else answer.send(self._description()))

    def check_health(self, answer: "Stream[bool]") -> None:
        """Somebody asks whether it serves."""
        self.when_awake(lambda: answer.reset() if self.life is None else answer.send(True))

    def ask_pins(self, begin: Callable[[SimulatedWarming], object], answer: "Stream[Any]") -> None:
        """Somebody wants something of its pins. Nobody there: its answer breaks."""

        def take() -> None:
            if self.life is None:
                answer.reset()
            elif answer.is_open:
                self.life.ends_with(answer)
                begin(self.life.pins)

        self.when_awake(take)

    def flush(self) -> None:
        """Empty the cache, after the step that is being computed."""
        if self.life is not None:
            self.life.command(Flush())

    def watch(
        self, stream: "Stream[News]", resume_from: Place | None, report_interval_s: float, router_id: str
    ) -> None:
        """A reader of the cache's news has come. Nobody there: its stream breaks."""

        def read() -> None:
            if self.life is None:
                stream.reset()
            elif stream.is_open:
                self.life.news.read(stream, resume_from, report_interval_s, router_id)

        self.when_awake(read)

    def draw(self) -> int:
        """64 bits by chance."""
        return self.rng.getrandbits(64)

    def build_engine(self, time: VirtualTime) -> FakeEngine:
        """The engine of a life."""
        engine = build_fake_engine(
            self.config, self.identity, self._timing, time, rng=self.sim.fork_rng(f"copies of {self.name}")
        )
        engine.runner.delay_ms = lambda: self.faults_now().delay_ms
        if engine.mover is not None:
            engine.mover.troubles = scripted_troubles(self.faults_now)
        return engine

    def faults_now(self) -> FaultsNow:
        """What goes wrong at this moment."""
        now = self._faults.at(self.sim.now - self._born)
        return now._replace(stalled=True) if self._held is not None else now

    def _description(self) -> Description:
        life = self.life
        assert life is not None
        core, ahead_s = life.engine.core, self.faults_now().clock_ahead_s
        return Description(life.incarnation, core.info, core.stats(), self.sim.now + ahead_s)

    def _plan_faults(self) -> None:
        begin_and_end = {FaultKind.CRASH: (self.crash, self.start), FaultKind.STALL: (self.stall, self.go_on)}
        for fault in self._faults.faults:
            if fault.kind in begin_and_end:
                begin, end = begin_and_end[fault.kind]
                self.sim.call_at(self._born + fault.at_s, begin)
                if fault.until_s < math.inf:
                    self.sim.call_at(self._born + fault.until_s, end)

    def __repr__(self) -> str:
        return f"<SimulatedWorker {self.name}: {self.life!r}>"
