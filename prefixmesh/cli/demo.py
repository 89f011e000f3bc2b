"""``prefixmesh demo``: see what prefix caches and routing by prefix save, on this machine."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from prefixmesh.demo.pinned import Pinned
    from prefixmesh.demo.show import Caching, DemoResult
    from prefixmesh.demo.summary import Row
    from prefixmesh.fleet.events import FleetEvent

_TITLES: Final = {"on": "With prefix caches", "off": "The same with caching off"}
_COLUMNS: Final = "  #  tenant            user    turn  worker     prompt  cached            first token"


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--users",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Users of each of the two tenants.",
)
@click.option(
    "--turns", type=click.IntRange(min=1), default=4, show_default=True, help="Questions each user asks."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=24, show_default=True, help="Of each answer."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to FILE."
)
def demo(model: str, workers: int, users: int, turns: int, max_tokens: int, json_file: Path | None) -> None:
    """Start two workers and a router, and serve two tenants' customers with and without prefix caches.

    Each tenant's policy of over 1,200 tokens opens every conversation; after the first pass it is pinned on all workers. Exit code 0 only
    when every request was answered, no tenant was served from the other's cache, and all workers held what was pinned.
    """
    from prefixmesh.cli.progress import FleetProgress
    from prefixmesh.demo.show import DemoSettings, run_demo
    from prefixmesh.demo.summary import as_json, find_problems

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = DemoSettings(model=model, workers=workers, users=users, turns=turns, max_tokens=max_tokens)
    with FleetProgress() as progress:

        def report(event: "FleetEvent") -> None:
            progress(event)
            if event.kind == "fleet_ready":
                click.secho(_COLUMNS, dim=True)

        result = run_demo(settings, report, _print_title, _print_row, _print_pinned)
    _print_summary(result)
    figures = (result.cache_on.summary, result.cache_off.summary)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(*figures, result.pinned), indent=2) + "\n")
    problems = find_problems(*figures, expected_requests=settings.requests) + result.pinned.problems()
    if problems:
        raise click.ClickException("; ".join(problems))


def _print_title(caching: "Caching") -> None:
    click.secho(f"\n{_TITLES[caching]}", bold=True)


def _print_row(row: "Row") -> None:
    share = row.cached_tokens / row.prompt_tokens
    click.secho(
        f"{row.number:3}  {row.tenant:16}  {row.user:6}  {row.turn:4}  {one_line(row.worker):9}  "
        f"{row.prompt_tokens:6,}  {row.cached_tokens:6,} ({share:4.0%})  {row.first_token_ms:9,.0f} ms",
        fg=None if row.is_cold else "green",
    )


def _print_pinned(pinned: "Pinned") -> None:
    from prefixmesh.demo.pinned import rows_of

    click.secho(f"\n{pinned.headline()}", bold=True)
    click.secho("     tenant            a new customer asks  prompt  cached            first token", dim=True)
    for tenant, visit in rows_of(pinned):
        share = visit.cached_tokens / visit.prompt_tokens
        click.secho(
            f"     {tenant:16}  {one_line(visit.worker):19}  {visit.prompt_tokens:6,}  "
            f"{visit.cached_tokens:6,} ({share:4.0%})  {visit.first_token_ms:9,.0f} ms",
            fg="green",
        )


def _print_summary(result: "DemoResult") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from prefixmesh.demo.summary import compare

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("caching on", justify="right", no_wrap=True)
    table.add_column("caching off", justify="right", no_wrap=True)
    for line in compare(result.cache_on.summary, result.cache_off.summary):
        table.add_row(*line)
    Console().print(table)
