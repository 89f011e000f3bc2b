"""``prefixmesh bench cache``: how fast the prefix cache is on this machine, and whether that is what was asked for."""

import dataclasses
import json
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

    from prefixmesh.bench.figures import Figure, Report
    from prefixmesh.bench.result import Result

LEGEND: Final = """
yardstick: comparing 12 KiB / an empty call beside the figure, and the scale they make.
others: the best known implementation that is compiled / the best in Python, on the machine of the targets."""


def _known() -> Collection[str]:
    from prefixmesh.bench.cache_plan import NAMES

    return NAMES


@click.command(short_help="Measure the prefix cache: times, memory, pauses.")
@bench_flags(_known, one_of_them="figure", quick="Small trees")
def cache(*, as_json: bool, check: bool, quick: bool, names: frozenset[str]) -> None:
    """Measure the prefix cache with everything switched on, at page sizes 1 and 16, in one or two minutes.

    Targets were set on one machine, and are scaled to this one by what two things take here, measured beside each figure:
    comparing two equal 12 KiB objects (220 ns there) and calling an empty method (26 ns there). Run it where nothing else runs.
    """
    from prefixmesh.bench import cache_bench, figures
    from prefixmesh.bench.cache_plan import FULL, QUICK

    refuse_quick_check(check=check, quick=quick)
    report = cache_bench.run_cache_bench(QUICK if quick else FULL, names, print_note)
    if quick:
        report = dataclasses.replace(report, results=unjudged(report.results))
    if as_json:
        click.echo(json.dumps(figures.as_json(report), indent=2))
    else:
        _print_table(report, quick=quick)
    if check and report.missed:
        missed = ", ".join(f"{one.figure.name} (page {one.figure.page_size})" for one in report.missed)
        raise click.ClickException(f"{len(report.missed)} of {_judged(report)} figures missed: {missed}")


def _judged(report: "Report") -> int:
    return sum(result.met is not None for result in report.results)


def _print_table(report: "Report", *, quick: bool) -> None:
    yardstick = report.yardstick
    click.echo(
        f"Python {report.python}, {report.cores} cores · 12 KiB compared in {yardstick.compare_ns:.0f} ns, empty call "
        f"{yardstick.call_ns:.0f} ns: {yardstick.scale:.2f} × the machine of the targets"
    )
    if quick:
        click.echo("quick: small trees and few repeats; these figures are no measure of anything")
    names = (
        "figure",
        "page",
        "size",
        "median",
        "p99",
        "longest",
        "target",
        "scaled",
        "",
        "yardstick",
        "others, page 1",
    )
    print_table(names, ("figure", ""), [_row(result) for result in report.results])
    for line in notes(report):
        click.echo(line)


def _row(result: "Result[Figure]") -> "list[str | Text]":
    figure, measured, yardstick = result.figure, result.measurement, result.yardstick
    unit = figure.unit.replace("us", "µs").replace("x", "×")
    others = figure.baseline
    return [
        figure.title,
        f"{figure.page_size}",
        f"{figure.size:,}",
        f"{amount(measured.median)} {unit}",
        amount(measured.p99),
        amount(measured.longest),
        amount(figure.target),
        amount(result.scaled_target),
        verdict(result.met),
        f"{yardstick.compare_ns:.0f} / {yardstick.call_ns:.0f} ns, {yardstick.scale:.2f}",
        f"{amount(others.compiled)} / {amount(others.python)}" if others else "",
    ]


def notes(report: "Report") -> list[str]:
    """Below the table: what its columns mean, and what else was seen."""
    lines = [LEGEND]
    for result in report.results:
        if result.notes:
            seen = ", ".join(
                f"{name.replace('_', ' ')} {amount(value)}" for name, value in result.notes.items()
            )
            lines.append(f"{result.figure.title.strip()}, page {result.figure.page_size}: {seen}")
    return lines
