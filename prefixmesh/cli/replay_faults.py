"""``prefixmesh replay TRACE --faults``: a piece of the trace for each seed through a fleet in which much goes wrong, and what must hold."""

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

import click
import xxhash

from prefixmesh.errors import ConfigError

if TYPE_CHECKING:
    from prefixmesh.sim.workload import Workload

MIXED: Final = "mixed"
"""Crashes, stalls, lies, refusals, cuts, lost and doubled news, dead routers, failing copies: what each seed draws (``fault_script``)."""

MAX_SEEDS: Final = 1_000_000
"""Two days of this machine's time."""


def run_faults(workload: "Workload", seed: int, seeds: int, *, as_json: bool) -> None:
    """Run so many seeds, one after the other. Prints what came of them, or the script and the last records of the first that breaks a
    rule, and exits with 1. Raises ConfigError for a number that is none, and without the worker's packages."""
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds must be from 1 to {MAX_SEEDS}, got {seeds}")
    try:
        from prefixmesh.sim.fault_run import run_seed
    except ImportError as error:
        raise ConfigError(
            "faults: fleets with faults need what workers do: pip install 'prefixmesh[worker]'"
        ) from error
    counts, digest = Counter[str](), xxhash.xxh3_64()
    for one in range(seed, seed + seeds):
        report = run_seed(one, workload)
        if report.problems:
            click.echo(str(report))
            click.echo(f"of {workload.name}: prefixmesh replay {workload.name} --faults {MIXED} --seed {one}")
            sys.exit(1)
        counts.update(requests=report.requests, finished=report.finished)
        counts.update(attempts=report.attempts, resumed=report.resumed, faults=len(report.script.lines()))
        digest.update(report.log_digest.encode())
    if as_json:
        told = {"form": "fleet", "trace": workload.name, "seed": seed, "seeds": seeds}
        click.echo(json.dumps({**told, **counts, "log_digest": digest.hexdigest()}, indent=2))
        return
    click.echo(
        f"{workload.name}: {seeds:,} seeds from {seed} on, {counts['requests']:,} requests under {counts['faults']:,} mishaps, "
        f"{counts['finished']:,} finished in {counts['attempts']:,} attempts, {counts['resumed']:,} of which went on from tokens that "
        f"had been given; the others ended in a typed error or with their caller. Nothing is broken, lost or left.\n"
        f"log digest {digest.hexdigest()}"
    )
