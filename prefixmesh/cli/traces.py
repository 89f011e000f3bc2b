"""``prefixmesh traces``: public traces and where they lie, and workloads that are made from a seed."""

from pathlib import Path

import click


@click.group()
def traces() -> None:
    """Find public traces, and make workloads, for `prefixmesh replay`."""


@traces.command("list", short_help="List public traces and workloads.")
def list_traces() -> None:
    """List the public traces that are known, and the workloads that can be made."""
    from prefixmesh.sim.public_traces import PUBLIC_TRACES
    from prefixmesh.sim.workloads.catalogue import GENERATORS

    rows = [("public", trace.name, trace.about) for trace in PUBLIC_TRACES.values()]
    rows += [
        (f"made; {make().requests:,} requests unless told", name, " ".join((make.__doc__ or "").split()))
        for name, make in GENERATORS.items()
    ]
    for kind, name, about in rows:
        click.echo(f"{name} ({kind})")
        click.echo(click.wrap_text(about, width=110, initial_indent="    ", subsequent_indent="    "))


@traces.command(short_help="Show where a public trace lies, and its checksum.")
@click.argument("name", metavar="NAME")
@click.option(
    "--check",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Say whether this file is the trace.",
)
def show(name: str, path: Path | None) -> None:
    """Show where a public trace lies, how large it is, and its SHA-256. It is not part of prefixmesh, and nothing is fetched here."""
    from prefixmesh.sim.public_traces import check_file, public_trace

    trace = public_trace(name)
    if path is not None:
        check_file(trace, path)
        click.echo(f"{path} is the trace {trace.name!r}")
        return
    click.echo(
        f"{trace.name}: {trace.about}\n"
        f"{trace.requests:,} requests, {trace.prompt_tokens:,} prompt tokens; {trace.licence}\n\n"
        f"    source  {trace.url}\n"
        f"    size    {trace.size_bytes:,} bytes\n"
        f"    sha256  {trace.sha256}\n\n"
        f"    curl -LO {trace.url}\n"
        f"    prefixmesh traces show {trace.name} --check {trace.filename}\n"
        f"    prefixmesh replay {trace.filename}"
    )


@traces.command(short_help="Make a workload from a seed.")
@click.argument("workload", metavar="WORKLOAD")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same file.")
@click.option(
    "--requests",
    type=int,
    help="About so many; where it is not given, the number that `prefixmesh traces list` shows.",
)
@click.option("--block-size", type=int, help="Tokens that a block has; 64 where it is not given.")
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Where it is written to."
)
def make(workload: str, seed: int, requests: int | None, block_size: int | None, out: Path) -> None:
    """Make a workload and write it as a file for `prefixmesh replay`. `prefixmesh traces list` tells which there are, and their lengths."""
    from random import Random

    from prefixmesh.sim.workload_file import write_workload
    from prefixmesh.sim.workloads.catalogue import make_workload

    given = {"requests": requests, "block_size": block_size}
    settings = {name: value for name, value in given.items() if value is not None}
    made = make_workload(workload, Random(seed).random, **settings)  # noqa: S311  chance to repeat, not to hide
    write_workload(made, out)
    click.echo(f"{out}: {len(made.requests):,} requests, {made.prompt_tokens:,} prompt tokens", err=True)
