"""``prefixmesh bench copies``: what copying KV from another worker costs on this machine, and whether that is what was asked for."""

import dataclasses
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import click

from prefixmesh.cli.bench_table import bench_flags, print_table, refuse_quick_check, unjudged
from prefixmesh.cli.bench_tiers import print_notes, row
from prefixmesh.cli.terminal import print_note

if TYPE_CHECKING:
    from prefixmesh.bench.tier_figures import Report

LEGEND: Final = """
Two workers, each with its engine in a process of its own; their fronts share one process. A prefix of random tokens is computed by one of
them and copied by the other, over gRPC; both sides' bytes are then compared. The first prefix warms up and is not told."""


def _known() -> Collection[str]:
    return ("copies",)


@click.command(short_help="Measure copying KV from another worker against computing it.")
@bench_flags(_known, one_of_them="part", quick="A small prefix")
def copies(*, as_json: bool, check: bool, quick: bool, names: frozenset[str]) -> None:
    """Measure what it costs to copy a prefix of 2,000 tokens from another worker with SmolLM2-135M on all cores, in a minute or two.

    The target is a ratio of two things measured in the same run, so it is not scaled. Run it where nothing else runs.
    """
    refuse_quick_check(check=check, quick=quick)
    report = _measure(quick=quick)
    if quick:
        report = dataclasses.replace(report, results=unjudged(report.results))
    if as_json:
        from prefixmesh.bench.tier_figures import as_json as to_json

        click.echo(json.dumps(to_json(report, in_process=False), indent=2))
    else:
        _print_report(report, quick=quick)
    if check and report.missed:
        missed = ", ".join(one.figure.name for one in report.missed)
        raise click.ClickException(f"{len(report.missed)} of {report.judged} figures missed: {missed}")


def _measure(*, quick: bool) -> "Report":
    from prefixmesh.bench.copies_bench import FULL, QUICK, run_copies_bench

    return run_copies_bench(QUICK if quick else FULL, progress=print_note)


def _print_report(report: "Report", *, quick: bool) -> None:
    setup = report.setup
    versions = ", ".join(f"{name} {number}" for name, number in setup.versions.items())
    click.echo(f"{setup.model}, {setup.threads} threads on {setup.cores} cores · {versions}")
    if quick:
        click.echo("quick: a small prefix and few repeats; these figures are no measure of anything")
    names = ("figure", "median", "most", "repeats", "target", "")
    print_table(names, ("figure", ""), [row(result) for result in report.results])
    click.echo(LEGEND)
    print_notes(report)
