"""``prefixmesh bench serve``: a workload on a running cluster, by the figures of ``prefixmesh replay``."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefixmesh.bench.serve_drive import ServeRun, ServeSpec
    from prefixmesh.bench.serve_figures import Served, ServeFigures
    from prefixmesh.sim.replay_figures import Objective, ReplayFigures
    from prefixmesh.sim.workload import Workload

INTERRUPTED: Final = 130
"""What shells report for a program that Ctrl-C ended."""


@click.command(short_help="Send a workload to a running cluster.")
@click.argument("workload", metavar="[WORKLOAD|FILE]", required=False)
@click.option(
    "--router", "address", metavar="HOST:PORT", help="Or a worker.  [default: the fleet that is up]"
)
@click.option(
    "--api-key",
    envvar="PREFIXMESH_API_KEY",
    show_envvar=True,
    help="With it, all tenants of the workload are the key's.",
)
@click.option("--speed", type=float, default=1.0, show_default=True, help="Come so many times faster.")
@click.option(
    "--concurrency",
    type=int,
    default=0,
    help="So many conversations at a time, the next when one ends, whatever the workload's times; 0: by its times.",
)
@click.option(
    "--requests", type=click.IntRange(min=1), help="The first so many; about so many of a workload by name."
)
@click.option(
    "--block-tokens",
    type=int,
    help="Make each block of the workload so many tokens, lengths with it: shares stay, prompts become shorter.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the workload and of what prompts are made of."
)
@click.option(
    "--ids", type=int, default=500, show_default=True, help="Prompts are of token ids from 100 to below this."
)
@click.option(
    "--adapters", is_flag=True, help="Ask for the adapters that the workload names; they must be loaded."
)
@click.option("--timeout-s", type=float, default=600.0, show_default=True, help="For one answer.")
@click.option("--slo-ttft-ms", type=float, help="Objective that goodput counts by: the first token, at most.")
@click.option("--slo-tpot-ms", type=float, help="The same of the time from token to token.")
@click.option(
    "--compare",
    metavar="cache=off,hash,radix",
    help="Start a pair of workers for each of these caches in turn, on this machine, and send it to those.",
)
@click.option(
    "--calibrate",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Start such a pair, measure how fast it is, and write that as a profile for `prefixmesh replay --profile`.",
)
@click.option("--simulate", metavar="PROFILE", help="Replay the same in simulated time, too, and show both.")
@click.option("--model", default="smollm2", show_default=True, help="Of the pair.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="In the pair; at --router how many there are.",
)
@click.option(
    "--device-tokens",
    type=int,
    default=16_384,
    show_default=True,
    help="KV of each, of the pair and simulated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def serve(
    context: click.Context,
    /,
    *,
    workload: str | None,
    requests: int | None,
    block_tokens: int | None,
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    compare: str | None,
    calibrate: Path | None,
    simulate: str | None,
    model: str,
    workers: int,
    device_tokens: int,
    as_json: bool,
    **load: Any,
) -> None:
    """Send the requests of a workload to a running cluster over gRPC, and tell the figures of `prefixmesh replay`, measured.

    WORKLOAD is a name that `prefixmesh traces list` shows, or a file: a trace, what `traces make` wrote, or what a router has recorded.
    Without one, --compare takes a small customer service. Ctrl-C ends it with what is there. Exits with 1 when every request failed.
    """
    from prefixmesh.bench.serve_drive import ServeSpec
    from prefixmesh.bench.serve_figures import figures_of
    from prefixmesh.bench.serve_pair import PairSpec
    from prefixmesh.cli import bench_serve_pair as pairs
    from prefixmesh.cli import bench_serve_table as tables
    from prefixmesh.cli.terminal import print_note

    pair = partial(PairSpec, model=model, workers=workers, device_tokens=device_tokens)
    if calibrate is not None:
        measured = pairs.calibrate(calibrate, pair(), load["seed"], load["ids"], print_note)
        click.echo(json.dumps(measured, indent=2))
        return
    kinds = None if compare is None else pairs.caches_of(compare)
    if kinds is None and workload is None:
        raise click.UsageError("name a workload or a file")
    if workload is None:
        sent = pairs.small_service(load["seed"], requests)
    else:
        sent = read(workload, load["seed"], requests, block_tokens)
    objective, spec = objective_of(slo_ttft_ms, slo_tpot_ms), ServeSpec(**load)
    # First, so that what it refuses costs no run that was measured.
    simulated = (
        {}
        if simulate is None
        else {
            kind: pairs.simulated(
                sent,
                simulate,
                cache=kind,
                workers=workers,
                device_tokens=device_tokens,
                spec=spec,
                objective=objective,
            )
            for kind in kinds or ("radix",)
        }
    )
    if kinds is None:
        run, is_whole = drive(sent, spec, "serving")
        runs = {"radix": run}
    else:
        runs, is_whole = pairs.run_pairs(
            kinds,
            pair(),
            lambda address: replace(spec, address=address, api_key=None),
            lambda spec, kind: drive(sent, spec, f"cache {kind}"),
            print_note,
        )
    found: dict[str, ServeFigures | ReplayFigures] = {}
    for kind, run in runs.items():
        figures = figures_of(run.served, objective, workers)
        label = (figures.policy or "measured") + (f"/{kind}" if kinds else "")
        found[label] = figures
        if kind in simulated and is_whole:
            found[f"{label} simulated"] = simulated[kind]
        tables.tell_problems(run, figures)
    if as_json:
        told = tables.as_object(sent, load, objective, found)
        click.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        tables.print_figures(sent, load, found)
    if not is_whole:
        click.echo("interrupted: figures are of what was over by then", err=True)
        context.exit(INTERRUPTED)
    if all(one.problem for run in runs.values() for one in run.served):
        context.exit(1)


def read(name: str, seed: int, requests: int | None, block_tokens: int | None) -> "Workload":
    """The workload that is asked for."""
    from prefixmesh.bench.serve_prompts import first_of, shortened
    from prefixmesh.cli.replay import read_trace_or_workload
    from prefixmesh.sim.workload_file import is_there

    is_file = is_there(name)
    found = read_trace_or_workload(name, seed, {} if is_file else {"requests": requests})
    if is_file and requests is not None:
        found = first_of(found, requests)
    return found if block_tokens is None else shortened(found, block_tokens)


def objective_of(ttft_ms: float | None, token_ms: float | None) -> "Objective":
    """What is soon enough; no matter when, where that was not said."""
    from prefixmesh.errors import ConfigError
    from prefixmesh.sim.replay_figures import Objective

    objective = Objective(ttft_ms or math.inf, token_ms or math.inf)
    for name, value in (("slo_ttft_ms", ttft_ms), ("slo_tpot_ms", token_ms)):
        if value is not None and not value > 0.0:
            raise ConfigError(f"{name} must be milliseconds above 0, got {value}")
    return objective


def drive(workload: "Workload", spec: "ServeSpec", what: str) -> "tuple[ServeRun, bool]":
    """Send it all; False where Ctrl-C ended that."""
    import asyncio

    from prefixmesh.bench.serve_drive import ServeRun

    with _progress(what, len(workload.requests)) as show:
        run = ServeRun(workload, spec, show)

        async def until_interrupted() -> bool:
            try:
                await run.run()
            except asyncio.CancelledError:
                return False
            return True

        return run, asyncio.run(until_interrupted())


@contextmanager
def _progress(what: str, requests: int) -> "Iterator[Callable[[Served], None]]":
    """A bar on stderr; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, failed = bar.add_task(what, total=requests), 0

        def show(one: "Served") -> None:
            nonlocal failed
            failed += bool(one.problem)
            bar.update(task, advance=1, description=f"{what}, {failed} failed" if failed else what)

        yield show
