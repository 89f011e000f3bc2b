"""What ``bench index`` and ``bench route`` print: the table of the router's figures, what else was seen, and the verdict."""

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from prefixmesh.cli.bench_table import amount, print_table, unjudged, verdict

if TYPE_CHECKING:
    from rich.text import Text

    from prefixmesh.bench.result import Result
    from prefixmesh.bench.router_figures import Figure, Report


def show(report: "Report", *, as_json: bool, check: bool, quick: bool, legend: str) -> None:
    """Print a report as JSON or as a table. Raises ClickException when ``check`` is set and figures were missed."""
    if quick:
        report = dataclasses.replace(report, results=unjudged(report.results))
    if as_json:
        from prefixmesh.bench.router_figures import as_json as to_json

        click.echo(json.dumps(to_json(report), indent=2))
    else:
        _print(report, quick=quick, legend=legend)
    if check and report.missed:
        missed = ", ".join(f"{one.figure.name} ({one.figure.at})" for one in report.missed)
        raise click.ClickException(f"{len(report.missed)} of {report.judged} figures missed: {missed}")


def _print(report: "Report", *, quick: bool, legend: str) -> None:
    yardstick = report.yardstick
    click.echo(
        f"Python {report.python}, {report.cores} cores · 12 KiB compared in {yardstick.compare_ns:.0f} ns, empty call "
        f"{yardstick.call_ns:.0f} ns: {yardstick.scale:.2f} × the machine of the targets"
    )
    if quick:
        click.echo("quick: small sizes and few repeats; these figures are no measure of anything")
    names = ("figure", "at", "median", "p99", "longest", "target", "scaled", "", "scale")
    print_table(names, ("figure", "at", ""), [_row(result) for result in report.results])
    click.echo(legend)
    for result in report.results:
        if result.notes:
            click.echo(f"{result.figure.title.strip()}, {result.figure.at}: {_notes(result)}")


def _row(result: "Result[Figure]") -> "list[str | Text]":
    figure, measured = result.figure, result.measurement
    return [
        figure.title,
        figure.at,
        f"{amount(measured.median)} {figure.unit.replace('us', 'µs')}",
        amount(measured.p99),
        amount(measured.longest),
        amount(figure.target),
        amount(result.scaled_target),
        verdict(result.met),
        f"{result.yardstick.scale:.2f}",
    ]


def _notes(result: "Result[Figure]") -> str:
    return ", ".join(f"{name.replace('_', ' ')} {amount(value)}" for name, value in result.notes.items())
