"""``python -m prefixmesh.sim.fault_run``: a whole fleet in simulated time under mixed faults, then quiet, then what must hold.

One seed is one run: a few workers with small caches, one or two routers, some forty requests of conversations, and a script of mishaps
(``fault_script``). When all of it is over and every request has ended, the fleet is given time to come to rest, is asked once more, and is
looked through (``fault_invariants``). A seed takes some two tenths of a second::

    python -m prefixmesh.sim.fault_run --seeds 10000       # until one fails
    python -m prefixmesh.sim.fault_run --seed 17 --trace   # that one again, with all that happened
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import click
import msgspec
import torch
import xxhash

from prefixmesh.config import EngineConfig
from prefixmesh.history import Closed, HistoryList
from prefixmesh.proto.cache_news import News
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.wishes import Wish
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fault_invariants import broken_rules, is_quiet
from prefixmesh.sim.fault_pins import PIN_SHARE, pin_wishes, pins_held, pins_rest
from prefixmesh.sim.fault_script import FleetScript, LinkFault, LinkFaultKind, draw_script
from prefixmesh.sim.fault_traffic import LONG_S, Callers, Traffic
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network
from prefixmesh.sim.simulated_router import SimulatedRouter
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.trace_traffic import TraceTraffic
from prefixmesh.sim.workload import Workload
from prefixmesh.worker_report import WorkerReport

VOCAB: Final = 64
"""Every step fills so many logits for each who samples."""

SETTLE_S: Final = 1.0
"""Before the first request: routers get to know the workers."""

LASTS_S: Final = 6.0
"""In which requests come and mishaps begin."""

QUIET_S: Final = 60.0
"""Within which a fleet that is left alone is as if nothing had been: a worker that was put out again and again stays out for half of it."""

LOOK_S: Final = 2.0
"""How often it is looked at whether it is."""

LAST_S: Final = 8.0
"""For the requests that are asked when all is quiet, and for what they leave."""

STREAM_IDLE_S: Final = 4.0
"""So short that answers which stop in the middle are carried on within a run."""

REPORT_S: Final = 1.0
SHOWN_RECORDS: Final = 40
"""Of each history, where a run has failed."""

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


@dataclass(slots=True)
class FaultReport:
    """What came of one seed."""

    seed: int
    script: FleetScript
    problems: list[str] = field(default_factory=list)
    """What does not hold; empty when all does."""

    requests: int = 0
    finished: int = 0
    resumed: int = 0
    """Attempts that went on from tokens."""

    attempts: int = 0
    loaded_back: int = 0
    """Tokens that came from host tiers, in the workers' last lives."""

    calls: int = 0
    """Of the simulation: the same seed makes as many."""

    has_pins: bool = False
    pins_held: int = 0
    """At the end, by all workers together."""

    log_digest: str = ""
    """Of all that was noted, with its times: the same for the same seed."""

    last_records: list[str] = field(default_factory=list)
    """Of a run that failed."""

    def __str__(self) -> str:
        pins = " --pins" if self.has_pins else ""
        again = f"again: python -m prefixmesh.sim.fault_run --seed {self.seed}{pins} --trace"
        return "\n".join(
            [f"seed {self.seed}", *self.script.lines(), *self.last_records, *self.problems, again]
        )


class FaultRun:
    """One seed. ``run`` it once."""

    def __init__(self, seed: int, workload: Workload | None = None, *, has_pins: bool = False) -> None:
        """``workload``: what is asked is a piece of it, made small (``trace_traffic``), and not conversations of our own. ``has_pins``: some
        of what those begin with is pinned (``fault_pins``)."""
        self.seed = seed
        self.wishes = pin_wishes(VOCAB) if has_pins else []
        self.sim = Simulation(seed)
        self.network = Network(self.sim, GOOD)
        rng = self.sim.fork_rng("fleet")
        names = [f"worker-{number}" for number in range(rng.randint(2, 4))]
        router_names = [f"router-{number}" for number in range(rng.randint(1, 2))]
        self.script = draw_script(self.sim.fork_rng("faults"), names, router_names, LASTS_S)
        clock = partial(_now, self.sim)
        self.histories = {name: HistoryList(clock) for name in (*router_names, *names)}
        engine = EngineConfig(
            page_size=rng.choice((1, 4, 16)),
            max_total_tokens=rng.choice((640, 1024)),
            chunked_prefill_size=64,
            max_running_requests=6,
            max_queued_requests=rng.choice((4, 64)),
            pin_share=PIN_SHARE,
            pin_owner_share=PIN_SHARE,
        )
        self.sim.run_for(0.0)
        tiers = self.sim.fork_rng("tiers")
        self.workers = {
            Endpoint(name): SimulatedWorker(
                self.sim,
                name,
                _with_tiers(engine, tiers.choice(HOST_RATIOS)),
                TIMING,
                identity=ModelIdentity(vocab_size=VOCAB, context_length=512),
                faults=self.script.workers[name],
                history=self.histories[name],
            )
            for name in names
        }
        self.routers = [
            SimulatedRouter(
                self.sim,
                self.network,
                name,
                self.workers,
                PolicyConfig(slow_start_s=rng.choice((0.0, 2.0))),
                report_interval_s=REPORT_S,
                stream_idle_s=STREAM_IDLE_S,
                history=self.histories[name],
                news_may_garble=_is_cache_news,
                wishes=self._wished if has_pins and name == router_names[0] else None,
            )
            for name in router_names
        ]
        self._plan(self.script)
        asks = self.sim.fork_rng("traffic")
        self.callers = Callers(self.sim, self.network, self.routers, asks, vocab_size=VOCAB)
        self.traffic = (
            Traffic(self.sim, self.callers, asks, vocab_size=VOCAB, lasts_s=LASTS_S)
            if workload is None
            else TraceTraffic(self.sim, self.callers, asks, workload, vocab_size=VOCAB, lasts_s=LASTS_S)
        )

    def run(self) -> FaultReport:
        """All of it; what it comes to. An error that comes out of the simulation is a problem like others."""
        report = FaultReport(self.seed, self.script, has_pins=bool(self.wishes))
        try:
            self._go_through()
            report.problems += broken_rules(self)
        except Exception as error:  # whatever it is, the seed and the script must be told
            logging.getLogger(__name__).debug("fault_run_failed", exc_info=True)
            report.problems.append(f"{type(error).__name__}: {error}")
        report.pins_held = pins_held(self.wishes, list(self.workers.values()), self.sim.now)
        clients = self.callers.clients
        report.requests, report.calls = len(clients), self.sim.calls
        report.finished = sum(one.error is None and one.ended_at is not None for one in clients)
        records = [one for history in self.histories.values() for one in history.records]
        report.resumed = sum(type(one).__name__ == "Resumed" for one in records)
        report.attempts = sum(type(one).__name__ == "Placed" for one in records)
        lives = [worker.life for worker in self.workers.values() if worker.life is not None]
        report.loaded_back = sum(life.engine.core.stats().tiers.loaded_back_tokens for life in lives)
        trace = self.trace()
        report.log_digest = xxhash.xxh3_64_hexdigest("\n".join(trace).encode())
        if report.problems:
            report.last_records = trace[-SHOWN_RECORDS:]
        return report

    def trace(self) -> list[str]:
        """All that was noted, in the order in which it happened."""
        lines = [
            (record.at, f"{name:10} {msgspec.json.encode(record).decode()}")
            for name, history in self.histories.items()
            for record in history.records
        ]
        return [f"{at:10.6f} {line}" for at, line in sorted(lines, key=lambda line: line[0])]

    def _wished(self) -> list[Wish]:
        return self.wishes

    def _go_through(self) -> None:
        self.sim.run_until(max(LASTS_S, self.script.over_s))
        end = self.sim.now + LONG_S
        while self.callers.open_requests and self.sim.now < end:
            self.sim.run_for(1.0)
        end = self.sim.now + QUIET_S
        self.sim.run_for(LOOK_S)
        while not (is_quiet(self) and pins_rest(self.routers, self.sim.now)) and self.sim.now < end:
            self.sim.run_for(LOOK_S)
        self.last = [
            self.callers.ask(self.traffic.question(), LONG_S, number) for number in range(len(self.routers))
        ]
        self.sim.run_for(LAST_S)
        for router in self.routers:
            router.close()
        for worker in self.workers.values():
            worker.history.note(Closed, worker.name)

    def _plan(self, script: FleetScript) -> None:
        by_name = {router.name: router for router in self.routers}
        for crash in script.routers:
            self.sim.call_at(crash.at_s, by_name[crash.name].crash)
            self.sim.call_at(crash.at_s + crash.for_s, by_name[crash.name].start)
        for fault in script.links:
            begin, end = self._of_link(fault)
            self.sim.call_at(fault.at_s, begin)
            self.sim.call_at(fault.at_s + fault.for_s, end)

    def _of_link(self, fault: LinkFault) -> tuple[Callable[[], object], Callable[[], object]]:
        network = self.network
        if fault.kind is LinkFaultKind.BAD:
            return partial(network.set_quality, BAD), partial(network.set_quality, GOOD)
        silently = fault.kind is LinkFaultKind.CUT_SILENTLY
        return partial(network.cut, *fault.ends, silently=silently), partial(network.mend, *fault.ends)


def run_seed(seed: int, workload: Workload | None = None, *, has_pins: bool = False) -> FaultReport:
    """One seed from beginning to end; see ``FaultRun``."""
    return FaultRun(seed, workload, has_pins=has_pins).run()


def first_failing(
    seeds: range, progress: Callable[[FaultReport], object] | None = None, *, has_pins: bool = False
) -> FaultReport | None:
    """The report of the first seed that does not hold; None where all do."""
    for seed in seeds:
        report = run_seed(seed, has_pins=has_pins)
        if progress is not None:
            progress(report)
        if report.problems:
            return report
    return None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", type=int, default=0, show_default=True, help="The first, or the only one.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="How many, one after the other."
)
@click.option("--trace", is_flag=True, help="Print all that was noted, of every seed.")
@click.option("--pins", is_flag=True, help="Pin some of what conversations begin with.")
def main(seed: int, seeds: int, *, trace: bool, pins: bool) -> None:
    """Run seeds of mixed faults in simulated time, until one breaks a rule."""
    torch.set_num_threads(1)
    if trace:
        logging.basicConfig(level=logging.DEBUG)
    requests = 0
    for one in range(seed, seed + seeds):
        run = FaultRun(one, has_pins=pins)
        report = run.run()
        requests += report.requests
        if trace:
            click.echo("\n".join(run.trace()))
        if trace or report.problems:
            click.echo(str(report))
        if report.problems:
            sys.exit(1)
    click.echo(f"{seeds} seeds from {seed} on, {requests} requests: nothing is broken")


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


if __name__ == "__main__":
    main(prog_name="python -m prefixmesh.sim.fault_run")
