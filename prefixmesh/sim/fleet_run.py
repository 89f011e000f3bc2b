"""A trace driven through a simulated fleet, and the figures of it.

Requests arrive when the trace says, or faster; each is routed by the next of the routers, in turn. The run is over when the last has ended.
Nothing in it is by the machine's clock, so a run repeats to the microsecond, and says nothing about this machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, PrefixmeshError
from prefixmesh.ids import Namespace
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network
from prefixmesh.sim.simulated_router import Answered, Question, SimulatedRouter
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.sim.timing import H100X2_70B, TimingModel
from prefixmesh.sim.traces import TraceRequest, prompt_tokens
from prefixmesh.tokens import count

TENANT: Final = Namespace(b"one trace, 1 set")
"""A trace says nothing of tenants: all its requests may share."""

BEGIN_S: Final = 1.0
"""Before the first arrival: routers get to know the workers."""

_MS_PER_S: Final = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """Which fleet, and how it is driven."""

    workers: int = 8
    routers: int = 1
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(
            page_size=64, max_total_tokens=2_000_000, max_running_requests=128, chunked_prefill_size=2048
        )
    )
    timing: TimingModel = H100X2_70B
    identity: ModelIdentity = field(default_factory=lambda: ModelIdentity(context_length=1 << 18))
    quality: LinkQuality = field(default_factory=LinkQuality)
    report_interval_s: float = 0.1
    speed: float = 1.0
    """How many times faster than in the trace requests arrive."""

    heat: HeatConfig | None = None
    """Each router keeps what is hot replicated by these bounds; None: nothing is."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.speed > 0.0:
            raise ConfigError(f"speed must be above 0, got {self.speed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetFigures:
    """What came of one run."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    """On all tiers."""

    host_tokens: int
    """Of those, what came from host tiers."""

    first_token_ms: tuple[float, float, float]
    """Median, 90th and 99th percentile, from the question to its first token at the router. Of those that had one."""

    max_over_mean: float
    """Of the prompt tokens sent to each worker."""

    busy_max_over_mean: float
    """Of the time that each worker computed."""

    busy_share: float
    """Of the workers' time from the first arrival to the last end."""

    lasted_s: float
    """From the first arrival to the last end."""

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens


class SimulatedFleet:
    """Workers and routers of one run."""

    def __init__(self, spec: FleetSpec, policy: PolicyConfig) -> None:
        self.spec = spec
        self.sim = Simulation(spec.seed)
        self.network = Network(self.sim, spec.quality)
        self.workers = {
            Endpoint(name): SimulatedWorker(self.sim, name, spec.engine, spec.timing, identity=spec.identity)
            for name in (f"worker-{index}" for index in range(spec.workers))
        }
        self.routers = [
            SimulatedRouter(
                self.sim,
                self.network,
                f"router-{index}",
                self.workers,
                policy,
                report_interval_s=spec.report_interval_s,
                heat=spec.heat,
            )
            for index in range(spec.routers)
        ]
        self.answered: list[Answered] = []
        self._left = 0
        self.sim.run_for(BEGIN_S)

    def ask_at(self, when: float, question: Callable[[], Question]) -> None:
        """Have a question asked at a time; it is made only then."""
        number = self._left
        self._left += 1
        self.sim.call_at(when, self._ask, self.routers[number % len(self.routers)], question)

    def run(self) -> None:
        """Until every question has its end."""
        while self._left and self.sim.step():
            pass

    def figures(self, began: float) -> FleetFigures:
        """Of all questions since ``began``, when the first was asked."""
        done = self.answered
        waits_ms = [
            (one.first_token_at - one.asked_at) * _MS_PER_S for one in done if one.first_token_at is not None
        ]
        percentiles = np.percentile(waits_ms, (50, 90, 99)) if waits_ms else np.zeros(3)
        sent = dict.fromkeys(self.workers, 0)
        for one in done:
            if one.worker:
                sent[Endpoint(one.worker)] += one.prompt_tokens
        busy = [worker.life.busy_s for worker in self.workers.values() if worker.life is not None]
        lasted_s = max(one.ended_at or began for one in done) - began
        return FleetFigures(
            requests=len(done),
            failed=sum(bool(one.error) for one in done),
            prompt_tokens=sum(one.prompt_tokens for one in done),
            cached_tokens=sum(one.cached_tokens for one in done),
            host_tokens=sum(one.host_tokens for one in done),
            first_token_ms=(float(percentiles[0]), float(percentiles[1]), float(percentiles[2])),
            max_over_mean=_max_over_mean(list(sent.values())),
            busy_max_over_mean=_max_over_mean(busy),
            busy_share=sum(busy) / (len(busy) * lasted_s) if busy and lasted_s else 0.0,
            lasted_s=lasted_s,
        )

    def _ask(self, router: SimulatedRouter, make: Callable[[], Question]) -> None:
        question = make()
        try:
            router.ask(question, self._on_end)
        except PrefixmeshError as error:  # no worker can take it: a figure, not the end of the run
            now = self.sim.now
            self._on_end(
                Answered(prompt_tokens=count(question.prompt), asked_at=now, ended_at=now, error=error.reason)
            )

    def _on_end(self, answered: Answered) -> None:
        self.answered.append(answered)
        self._left -= 1


def run_trace(
    requests: Sequence[TraceRequest],
    spec: FleetSpec,
    policy: PolicyConfig,
    progress: Callable[[int], None] | None = None,
) -> FleetFigures:
    """Drive a trace through a fleet. Some 50 ms of this machine's time a request of 12,000 tokens; ``progress`` is told of each end."""
    fleet = SimulatedFleet(spec, policy)
    began = fleet.sim.now
    first_s = requests[0].arrival_s
    for request in requests:
        when = began + (request.arrival_s - first_s) / spec.speed
        fleet.ask_at(when, partial(_question, request, spec))
    if progress is not None:
        _tell_often(fleet, progress)
    fleet.run()
    return fleet.figures(began)


def _question(request: TraceRequest, spec: FleetSpec) -> Question:
    return Question(
        namespace=TENANT,
        prompt=prompt_tokens(request, spec.identity.vocab_size),
        max_tokens=max(1, request.output_length),
    )


def _tell_often(fleet: SimulatedFleet, progress: Callable[[int], None]) -> None:
    def tell() -> None:
        progress(len(fleet.answered))
        fleet.sim.call_later(1.0, tell)

    tell()


def _max_over_mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values) if values else 0.0
    return max(values) / mean if mean else 1.0
