"""``prefixmesh history``: what routers have noted of each request, summed up and checked."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from prefixmesh.history_report import HistoryReport


@click.command()
@click.argument(
    "paths",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def history(context: click.Context, paths: tuple[Path, ...], *, as_json: bool) -> None:
    """Check the histories that routers have kept (`--history FILE`), and sum them up.

    Every request must end once, each token be passed on once and in order, every reservation be given back once. Exits with 1 when
    anything was not so. What is open in a router's life that goes on, or that was killed, is only counted. Direct
    requests are attempts and reservations here, not requests. A file without any record is no history, and proves nothing.
    """
    from prefixmesh.errors import ConfigError
    from prefixmesh.history_check import HistoryChecker
    from prefixmesh.history_file import read_history

    checker = HistoryChecker()
    for path in paths:
        records = 0
        for line in read_history(path):
            checker.take(*line)
            records += line.record is not None
        if not records:
            raise ConfigError(f"history {path}: no line of it is a record")
    report = checker.finish()
    click.echo(json.dumps(as_dict(report), indent=2) if as_json else _as_text(report))
    if report.violations:
        context.exit(1)


def as_dict(report: "HistoryReport") -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "lives": report.lives,
        "requests": report.requests,
        "outcomes": report.outcomes,
        "open_requests": report.open_requests,
        "attempts": report.attempts,
        "resumed": report.resumed,
        "tokens": report.tokens,
        "reservations": report.reservations,
        "open_reservations": report.open_reservations,
        "lost_records": report.lost,
        "unread_lines": report.unread,
        "violations_in_all": report.violations_in_all,
        "violations": [
            {
                "rule": one.rule.value,
                "request_id": one.request_id,
                "problem": one.problem,
                "lines": [str(place) for place in one.places],
            }
            for one in report.violations
        ],
    }


def _as_text(report: "HistoryReport") -> str:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    lines = [
        f"{report.requests} requests in {report.lives} lives: {outcomes or 'none ended'}; {report.open_requests} open",
        f"{report.attempts} attempts, {report.resumed} of them resumed; {report.tokens} tokens passed on",
        f"{report.reservations} reservations, {report.open_reservations} not settled yet",
    ]
    if report.lost or report.unread:
        lines.append(
            f"incomplete: {report.lost} records lost, {report.unread} lines not read; what is missing may show as a violation"
        )
    lines += [f"violation: {one}" for one in report.violations]
    untold = report.violations_in_all - len(report.violations)
    if untold:
        lines.append(f"and {untold} more violations")
    if not report.violations:
        lines.append("no violations")
    return "\n".join(lines)
