"""The fleet of a fault run: a few workers with small caches, one or two routers, and, where it is hit, the store that routers share.

How large it is and how each worker is set is drawn from the run's seed; what goes wrong says a script, which is planned here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from prefixmesh.config import EngineConfig
from prefixmesh.history import HistoryList
from prefixmesh.proto.cache_news import News
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fault_pins import PIN_SHARE, Pinned
from prefixmesh.sim.fault_script import STORE, FleetScript, LinkFault, LinkFaultKind
from prefixmesh.sim.fault_state import FleetState
from prefixmesh.sim.faults import FaultKind
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network
from prefixmesh.sim.simulated_router import SimulatedRouter
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.sim.timing import TimingModel
from prefixmesh.worker_report import WorkerReport

VOCAB: Final = 64
"""Every step fills so many logits for each who samples."""

STREAM_IDLE_S: Final = 4.0
"""So short that answers which stop in the middle are carried on within a run."""

REPORT_S: Final = 1.0

GOOD: Final = LinkQuality(jitter_s=0.002)
BAD: Final = LinkQuality(delay_s=0.002, jitter_s=0.02, loss=0.05, duplicate=0.05, late=0.1, late_s=0.3)
TIMING: Final = TimingModel(
    step_ms=25.0,
    prefill_ms_per_token=0.3,
    decode_ms_per_sequence=0.5,
    load_back_ms_per_token=0.1,
    offload_ms_per_token=0.1,
)
"""Slow beside the network, so that answers are under way when something happens; and copies beside steps."""

HOST_RATIOS: Final = (0.0, 0.0, 0.5, 3.0)
"""Of workers' host tiers: none, one that overflows, and one that holds nearly all that comes."""

TIGHT_TOKENS: Final = 400
"""A pool before a host tier: hardly more than the longest conversation has, so that what is old has to go."""

_OF_COPIES: Final = frozenset({FaultKind.COPY_DELAY, FaultKind.COPY_FAIL})


class FaultFleet:
    """See the module. ``rng`` is the seed's for the fleet; ``pins`` need a store, which there is where any are given."""

    def __init__(
        self,
        sim: Simulation,
        script: FleetScript,
        rng: Random,
        pins: Sequence[Pinned],
        lasts_s: float,
    ) -> None:
        self.sim = sim
        self.network = Network(sim, GOOD)
        clock = partial(_now, sim)
        names = list(script.workers)
        self.histories = {name: HistoryList(clock) for name in (*script.router_names, *names)}
        engine = _draw_engine(rng)
        sim.run_for(0.0)
        tiers, ratios = sim.fork_rng("tiers"), _host_ratios(script)
        self.workers = {
            Endpoint(name): SimulatedWorker(
                sim,
                name,
                _with_tiers(engine, tiers.choice(ratios)),
                TIMING,
                identity=ModelIdentity(vocab_size=VOCAB, context_length=512),
                faults=script.workers[name],
                history=self.histories[name],
            )
            for name in names
        }
        self.state = FleetState(sim, GOOD, names, pins) if pins else None
        self.routers = [
            SimulatedRouter(
                sim,
                self.network,
                name,
                self.workers,
                PolicyConfig(slow_start_s=rng.choice((0.0, 2.0))),
                report_interval_s=REPORT_S,
                stream_idle_s=STREAM_IDLE_S,
                history=self.histories[name],
                news_may_garble=_is_cache_news,
                shared=None if self.state is None else self.state.shared,
            )
            for name in script.router_names
        ]
        self._plan(script)
        if self.state is not None:
            self.state.plan(script.store, sim.fork_rng("operator"), lasts_s)

    def _plan(self, script: FleetScript) -> None:
        by_name = {router.name: router for router in self.routers}
        for crash in script.routers:
            self.sim.call_at(crash.at_s, by_name[crash.name].crash)
            self.sim.call_at(crash.at_s + crash.for_s, by_name[crash.name].start)
        for fault in script.links:
            for network in self._networks(fault):
                begin, end = _of_link(network, fault)
                self.sim.call_at(fault.at_s, begin)
                self.sim.call_at(fault.at_s + fault.for_s, end)

    def _networks(self, fault: LinkFault) -> list[Network]:
        """Which a mishap is of: a bad time is bad for all."""
        store = [] if self.state is None else [self.state.store.network]
        if fault.kind is LinkFaultKind.BAD:
            return [self.network, *store]
        return store if STORE in fault.ends else [self.network]


def _of_link(network: Network, fault: LinkFault) -> tuple[Callable[[], object], Callable[[], object]]:
    if fault.kind is LinkFaultKind.BAD:
        return partial(network.set_quality, BAD), partial(network.set_quality, GOOD)
    silently = fault.kind is LinkFaultKind.CUT_SILENTLY
    return partial(network.cut, *fault.ends, silently=silently), partial(network.mend, *fault.ends)


def _draw_engine(rng: Random) -> EngineConfig:
    return EngineConfig(
        page_size=rng.choice((1, 4, 16)),
        max_total_tokens=rng.choice((640, 1024)),
        chunked_prefill_size=64,
        max_running_requests=6,
        max_queued_requests=rng.choice((4, 64)),
        pin_share=PIN_SHARE,
        pin_owner_share=PIN_SHARE,
    )


def _host_ratios(script: FleetScript) -> Sequence[float]:
    """Where nothing but copies goes wrong, all workers make some."""
    kinds = {fault.kind for one in script.workers.values() for fault in one.faults}
    is_all = not (script.routers or script.links or script.store)
    return (
        [ratio for ratio in HOST_RATIOS if ratio] if is_all and kinds and kinds <= _OF_COPIES else HOST_RATIOS
    )


def _with_tiers(engine: EngineConfig, host_ratio: float) -> EngineConfig:
    if not host_ratio:
        return engine
    return replace(engine, hicache_ratio=host_ratio, max_total_tokens=TIGHT_TOKENS)


def _is_cache_news(news: News) -> bool:
    """What is garbled on bad links: the news of caches, whose order is proved by numbers and sums. Reports come in order: what they
    say of reservations is said once."""
    return not isinstance(news, WorkerReport)


def _now(sim: Simulation) -> float:
    return sim.now
