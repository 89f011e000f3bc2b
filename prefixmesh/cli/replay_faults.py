"""``prefixmesh replay TRACE --faults``: a piece of the trace for each seed through a fleet in which much goes wrong, and what must hold."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.errors import ConfigError

if TYPE_CHECKING:
    from prefixmesh.sim.fault_run import FaultReport
    from prefixmesh.sim.fault_seeds import Tally
    from prefixmesh.sim.workload import Workload

MAX_SEEDS: Final = 1_000_000
"""Ten days of a core."""

MAX_JOBS: Final = 64
"""Processes, each of some 400 MB."""

MOST_FAILED: Final = 5
"""Seeds that break a rule before it stops: more of them say no more."""

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
"""As a shell tells of a program that SIGINT ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCommand:
    """What was asked."""

    trace: str
    faults: str
    """Kinds of mishaps, or a file."""

    seed: int
    seeds: int
    jobs: int = 1
    made: dict[str, int | None] = field(default_factory=dict)
    """Settings of the trace's generator."""

    as_json: bool = False

    def __post_init__(self) -> None:
        for name, most in (("seeds", MAX_SEEDS), ("jobs", MAX_JOBS)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from 1 to {most}, got {getattr(self, name)}")

    def again(self, seed: int) -> str:
        """The command that runs one seed again."""
        made = [(name, value) for name, value in self.made.items() if value is not None]
        options = [part for name, value in made for part in (f"--{name.replace('_', '-')}", str(value))]
        return shlex.join(
            ["prefixmesh", "replay", self.trace, *options, "--faults", self.faults, "--seed", str(seed)]
        )


def print_script(command: FaultCommand) -> None:
    """Print what goes wrong in the first seed, as ``--faults FILE`` reads it. Raises ConfigError as ``read_plan``."""
    from prefixmesh.sim.fault_file import as_object
    from prefixmesh.sim.fault_plan import read_plan, script_of

    click.echo(as_json_lines(as_object(script_of(command.seed, read_plan(command.faults)))))


def run_faults(command: FaultCommand, load: Callable[[], "Workload"]) -> None:
    """Run the seeds. Prints what came of them; of those that break a rule the script, the last records and the command that runs them again,
    and then exits with 1. Raises ConfigError for a plan that is none, as ``load``, and without the worker's packages."""
    try:
        from prefixmesh.sim.fault_plan import read_plan
        from prefixmesh.sim.fault_seeds import Tally, run_seeds
    except ImportError as error:
        raise ConfigError(
            "faults: fleets with faults need what workers do: pip install 'prefixmesh[worker]'"
        ) from error
    seeds, plan = range(command.seed, command.seed + command.seeds), read_plan(command.faults)
    name, tally, failed = load().name, Tally(), list["FaultReport"]()
    try:
        with (
            closing(run_seeds(load, seeds, plan, jobs=command.jobs)) as reports,
            _progress(command) as show,
        ):
            for report in reports:
                tally.add(report)
                if report.problems:
                    failed.append(report)
                    _tell_failed(command, report)
                show(tally, len(failed))
                if len(failed) == MOST_FAILED:
                    break
    except KeyboardInterrupt:
        _tell_interrupted(command, tally, len(failed))
        sys.exit(EXIT_INTERRUPTED)
    _tell(command, name, tally, failed)
    if failed:
        sys.exit(EXIT_FAILED)


def as_json_lines(script: dict[str, Any]) -> str:
    """A script with a mishap a line, which is what people edit."""
    lines = ",\n".join(f"  {json.dumps(one)}" for one in script["faults"])
    return f'{{"workers": {script["workers"]}, "routers": {script["routers"]}, "faults": [\n{lines}\n]}}'


def _tell(command: FaultCommand, name: str, tally: "Tally", failed: "list[FaultReport]") -> None:
    counts = tally.counts
    if command.as_json:
        click.echo(json.dumps(_as_object(command, name, tally, failed), indent=2))
    elif failed:
        of_all = f"{name}: {len(failed)} of {counts['seeds']:,} seeds broke a rule"
        left = command.seeds - counts["seeds"]
        click.echo(of_all + (f"; the other {left:,} were not run" if left else ""))
    else:
        click.echo(
            f"{name}: {counts['seeds']:,} seeds from {command.seed} on, {counts['requests']:,} requests under {counts['faults']:,} "
            f"mishaps, {counts['finished']:,} finished in {counts['attempts']:,} attempts, {counts['resumed']:,} of which went on "
            f"from tokens that had been given; the others ended in a typed error or with their caller. Nothing is broken, lost or "
            f"left.\nlog digest {tally.log_digest}"
        )


def _as_object(
    command: FaultCommand, name: str, tally: "Tally", failed: "list[FaultReport]"
) -> dict[str, Any]:
    """What was asked, what came of it, and of the seeds that failed all that runs them again."""
    from prefixmesh.sim.fault_file import as_object
    from prefixmesh.sim.fault_plan import read_plan, script_of

    told: dict[str, Any] = {
        "form": "fleet",
        "trace": name,
        "faults_asked": command.faults,
        "seed": command.seed,
    }
    told |= tally.counts
    told["log_digest"] = tally.log_digest
    told["failed"] = [
        {
            "seed": one.seed,
            "problems": one.problems,
            "again": command.again(one.seed),
            "script": as_object(one.script),
        }
        for one in failed
    ]
    if command.seeds == 1:
        told["script"] = as_object(script_of(command.seed, read_plan(command.faults)))
    return told


def _tell_failed(command: FaultCommand, report: "FaultReport") -> None:
    """At once: whoever waits for a thousand seeds wants to know of the first."""
    again = command.again(report.seed)
    click.echo(f"{report}\nagain: {again}\nits script, to edit: {again} --print-script", err=command.as_json)


def _tell_interrupted(command: FaultCommand, tally: "Tally", failed: int) -> None:
    done = tally.counts["seeds"]
    broken = f"{failed} of them broke a rule" if failed else "none broke a rule"
    rest = f"--seed {command.seed + done} --seeds {command.seeds - done}"
    click.echo(
        f"stopped after {done:,} of {command.seeds:,} seeds, from {command.seed} on; {broken}. The rest: {rest}",
        err=True,
    )


@contextmanager
def _progress(command: FaultCommand) -> "Iterator[Callable[[Tally, int], None]]":
    """A bar over the seeds on stderr; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _tally, _failed: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("seeds", total=command.seeds)

        def show(tally: "Tally", failed: int) -> None:
            what = f"seeds, {failed} failed" if failed else "seeds"
            bar.update(task, description=what, completed=tally.counts["seeds"])

        yield show
