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
from dataclasses import dataclass, field
from typing import Final

import click
import msgspec
import torch
import xxhash

from prefixmesh.errors import ConfigError
from prefixmesh.history import Closed
from prefixmesh.router.pins.wishes import Wish
from prefixmesh.sim.fault_fleet import VOCAB, FaultFleet
from prefixmesh.sim.fault_invariants import broken_rules, is_quiet
from prefixmesh.sim.fault_pins import beginnings, pins_held, pins_rest
from prefixmesh.sim.fault_plan import ALL_MIXED, LASTS_S, MIXED, FaultPlan, read_plan
from prefixmesh.sim.fault_script import FleetScript
from prefixmesh.sim.fault_traffic import LONG_S, Callers, Traffic
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.trace_traffic import TracePiece, TraceTraffic
from prefixmesh.sim.workload import Workload

QUIET_S: Final = 60.0
"""Within which a fleet that is left alone is as if nothing had been: a worker that was put out again and again stays out for half of it."""

LOOK_S: Final = 2.0
"""How often it is looked at whether it is."""

LAST_S: Final = 8.0
"""For the requests that are asked when all is quiet, and for what they leave."""

SHOWN_RECORDS: Final = 40
"""Of all histories, where a run has failed."""


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

    pins_held: int = 0
    """At the end, by all workers together."""

    log_digest: str = ""
    """Of all that was noted, with its times: the same for the same seed."""

    last_records: list[str] = field(default_factory=list)
    """Of a run that failed."""

    def __str__(self) -> str:
        """All of it but how to run it again, which whoever ran it knows."""
        return "\n".join([f"seed {self.seed}", *self.script.lines(), *self.last_records, *self.problems])


class FaultRun:
    """One seed. ``run`` it once."""

    def __init__(
        self,
        seed: int,
        workload: Workload | None = None,
        *,
        has_pins: bool = False,
        plan: FaultPlan = ALL_MIXED,
    ) -> None:
        """``workload``: what is asked is a piece of it, made small (``trace_traffic``), and not conversations of our own. There are pins where its
        requests have some; else some of what it begins with is pinned (``fault_pins``) with ``has_pins``, and where the store is hit."""
        self.seed = seed
        self.sim = Simulation(seed)
        rng, asks = self.sim.fork_rng("fleet"), self.sim.fork_rng("traffic")
        self.script = plan.script(self.sim.fork_rng, rng, LASTS_S)
        piece = None if workload is None else TracePiece(workload, asks, VOCAB)
        pins = [] if piece is None else piece.pins()
        if not pins and (has_pins or self.script.has_store):
            pins = beginnings(VOCAB) if piece is None else piece.beginnings()
        fleet = FaultFleet(self.sim, self.script, rng, pins, LASTS_S)
        self.workers, self.routers, self.state = fleet.workers, fleet.routers, fleet.state
        self.histories = fleet.histories
        self.callers = Callers(self.sim, fleet.network, self.routers, asks, vocab_size=VOCAB)
        self.traffic = (
            Traffic(self.sim, self.callers, asks, vocab_size=VOCAB, lasts_s=LASTS_S)
            if piece is None
            else TraceTraffic(self.sim, self.callers, asks, piece, lasts_s=LASTS_S)
        )

    @property
    def wishes(self) -> list[Wish]:
        """What is to be pinned now."""
        return [] if self.state is None else self.state.wishes()

    def run(self) -> FaultReport:
        """All of it; what it comes to. An error that comes out of the simulation is a problem like others."""
        report = FaultReport(self.seed, self.script)
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
        if self.state is not None:
            lines += self.state.log
        return [f"{at:10.6f} {line}" for at, line in sorted(lines, key=lambda line: line[0])]

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


def run_seed(
    seed: int, workload: Workload | None = None, *, has_pins: bool = False, plan: FaultPlan = ALL_MIXED
) -> FaultReport:
    """One seed from beginning to end; see ``FaultRun``."""
    return FaultRun(seed, workload, has_pins=has_pins, plan=plan).run()


def first_failing(
    seeds: range,
    progress: Callable[[FaultReport], object] | None = None,
    *,
    has_pins: bool = False,
    plan: FaultPlan = ALL_MIXED,
) -> FaultReport | None:
    """The report of the first seed that does not hold; None where all do."""
    for seed in seeds:
        report = run_seed(seed, has_pins=has_pins, plan=plan)
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
@click.option(
    "--faults",
    default=MIXED,
    show_default=True,
    help="Kinds of mishaps, or a file, as of `prefixmesh replay`.",
)
@click.option("--trace", is_flag=True, help="Print all that was noted, of every seed.")
@click.option("--pins", is_flag=True, help="Pin some of what conversations begin with.")
def main(seed: int, seeds: int, faults: str, *, trace: bool, pins: bool) -> None:
    """Run seeds of mishaps in simulated time, until one breaks a rule."""
    torch.set_num_threads(1)
    if trace:
        logging.basicConfig(level=logging.DEBUG)
    requests = 0
    try:
        plan = read_plan(faults)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    for one in range(seed, seed + seeds):
        run = FaultRun(one, has_pins=pins, plan=plan)
        report = run.run()
        requests += report.requests
        if trace:
            click.echo("\n".join(run.trace()))
        if trace or report.problems:
            click.echo(str(report))
        if report.problems:
            more = (" --pins" if pins else "") + ("" if faults == MIXED else f" --faults {faults}")
            click.echo(f"again: python -m prefixmesh.sim.fault_run --seed {one}{more} --trace")
            sys.exit(1)
    click.echo(f"{seeds} seeds from {seed} on, {requests} requests: nothing is broken")


if __name__ == "__main__":
    main(prog_name="python -m prefixmesh.sim.fault_run")
