"""``prefixmesh bench tiers``: what KV beyond the device's memory is worth on this machine, and whether that is what was asked for."""

import dataclasses
import json
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import click

from prefixmesh.cli.bench_table import (
    amount,
    bench_flags,
    print_table,
    refuse_quick_check,
    unjudged,
    verdict,
)
from prefixmesh.cli.terminal import print_note

if TYPE_CHECKING:
    from rich.text import Text

    from prefixmesh.bench.result import Result
    from prefixmesh.bench.tier_figures import Figure, Report

LEGEND: Final = """
prompt tokens from cache: the same conversations on each engine, the device's pool a third of what they come to.
The engine runs in this process, as in its own: no gRPC and no socket is in a figure."""


def _known() -> Collection[str]:
    from prefixmesh.bench.tier_plan import PARTS

    return PARTS


@click.command(short_help="Measure the host and disk tiers: hits, load-back, backups, a restart.")
@bench_flags(_known, one_of_them="part", quick="Small prompts")
def tiers(*, as_json: bool, check: bool, quick: bool, names: frozenset[str]) -> None:
    """Measure what host memory and a disk behind the device's KV are worth with SmolLM2-135M on all cores, in some minutes.

    Targets are shares and ratios of what is measured in the same run, so none is scaled. Run it where nothing else runs.
    """
    refuse_quick_check(check=check, quick=quick)
    report = _measure(names, quick=quick)
    if quick:
        report = dataclasses.replace(report, results=unjudged(report.results))
    if as_json:
        from prefixmesh.bench.tier_figures import as_json as to_json

        click.echo(json.dumps(to_json(report), indent=2))
    else:
        _print_report(report, quick=quick)
    if check and report.missed:
        missed = ", ".join(one.figure.name for one in report.missed)
        raise click.ClickException(f"{len(report.missed)} of {report.judged} figures missed: {missed}")


def _measure(names: frozenset[str], *, quick: bool) -> "Report":
    from prefixmesh.worker.process_engine import ENGINE_ENVIRONMENT

    for name, value in ENGINE_ENVIRONMENT.items():  # before torch is loaded, as in an engine's process
        os.environ.setdefault(name, value)
    from prefixmesh.bench.tier_plan import FULL, QUICK
    from prefixmesh.bench.tiers_bench import run_tiers_bench

    return run_tiers_bench(QUICK if quick else FULL, only=names, progress=print_note)


def _print_report(report: "Report", *, quick: bool) -> None:
    setup = report.setup
    versions = ", ".join(f"{name} {number}" for name, number in setup.versions.items())
    click.echo(f"{setup.model} in {setup.dtype}, {setup.threads} threads on {setup.cores} cores · {versions}")
    if quick:
        click.echo("quick: small prompts and few repeats; these figures are no measure of anything")
    names = ("figure", "median", "most", "repeats", "target", "")
    print_table(names, ("figure", ""), [row(result) for result in report.results])
    click.echo(LEGEND)
    print_notes(report)


def print_notes(report: "Report") -> None:
    """What else is good to know of each figure."""
    for result in report.results:
        if result.notes:
            seen = ", ".join(
                f"{name.replace('_', ' ')} {amount(value)}" for name, value in result.notes.items()
            )
            click.echo(f"{result.figure.title.strip()}: {seen}")


def row(result: "Result[Figure]") -> "list[str | Text]":
    """A figure as a line of the table."""
    figure, measured = result.figure, result.measurement
    return [
        figure.title,
        _told(measured.median, figure.unit),
        _told(measured.longest, figure.unit) if measured.repeats > 1 else "",
        f"{measured.repeats}",
        "" if figure.target is None else _told(figure.target, figure.unit),
        verdict(result.met),
    ]


def _told(value: float | None, unit: str) -> str:
    if value is not None and unit == "share":
        return f"{value:.1%}"
    return f"{amount(value)} {'×' if unit == 'x' else unit}"
