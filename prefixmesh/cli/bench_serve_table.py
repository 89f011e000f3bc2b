"""The figures of ``prefixmesh bench serve``, for people and for machines."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line

if TYPE_CHECKING:
    from prefixmesh.bench.serve_drive import ServeRun
    from prefixmesh.bench.serve_figures import ServeFigures
    from prefixmesh.sim.replay_figures import Objective, Percentiles, ReplayFigures
    from prefixmesh.sim.workload import Workload

LEGEND: Final = """
cached: share of the prompt tokens of all answers that were found cached, on any tier. ttft: from when a request was due to its first token here.
token: from one token of an answer to its next. load: the most prompt tokens of a worker by the mean. good: requests that met the objective.
Measured on this machine, and on the cluster's as busy as they are; prompts are made of the workload's blocks, answers are as long as it says."""


def print_figures(
    workload: "Workload", spec: Mapping[str, Any], found: "Mapping[str, ServeFigures | ReplayFigures]"
) -> None:
    """A title, a table with a row a run, and what its columns mean."""
    from prefixmesh.cli.tables import print_table

    columns = ("policy", "requests", "errors", "cached", "ttft p50", "p90", "p99 ms", "token p50", "p99 ms")
    rows = [_row(label, one) for label, one in found.items()]
    click.echo(f"{about(workload, spec)}\n")
    print_table((*columns, "tokens/s", "load", "good"), rows)
    click.echo(LEGEND)


def about(workload: "Workload", spec: Mapping[str, Any]) -> str:
    """What was sent, in a line. Its name is a file's, and must not steer the terminal."""
    way = (
        f"{spec['concurrency']:,} conversations at a time"
        if spec["concurrency"]
        else f"at its times, speed {spec['speed']:g}"
    )
    return one_line(
        f"{workload.name}: {len(workload.requests):,} requests, {workload.prompt_tokens:,} prompt tokens in blocks of "
        f"{workload.block_size}, {way}"
    )


def as_object(
    workload: "Workload",
    spec: Mapping[str, Any],
    objective: "Objective",
    found: "Mapping[str, ServeFigures | ReplayFigures]",
) -> dict[str, Any]:
    """The same for JSON, with the names that a replay has."""
    return {
        "form": "measured",
        "trace": {
            "name": workload.name,
            "block_size": workload.block_size,
            "requests": len(workload.requests),
        },
        "load": {name: spec[name] for name in ("speed", "concurrency", "seed")},
        "objective": {
            name: value if math.isfinite(value) else None for name, value in objective._asdict().items()
        },
        "policies": {label: figures.as_json() for label, figures in found.items()},
    }


def tell_problems(run: "ServeRun", figures: "ServeFigures") -> None:
    """What went wrong, by kind, with what the first of each said."""
    for kind, count in figures.errors.items():
        click.echo(f"{count} × {kind}: {one_line(run.problems[kind])}", err=True)


def _row(label: str, figures: "ServeFigures | ReplayFigures") -> list[str]:
    told: Mapping[str, Any] = figures.as_json()
    ttft, token = figures.ttft_ms, figures.token_ms
    return [
        label,
        f"{figures.requests:,}",
        f"{sum(told.get('errors', {}).values()):,}",
        f"{figures.cached_share:.2%}",
        *_cells(ttft, "{:,.0f}"),
        *_cells(token, "{:,.1f}")[::2],
        f"{told['tokens_per_s']:,.1f}",
        f"{figures.max_over_mean:.2f}",
        f"{figures.goodput_share:.1%}",
    ]


def _cells(percentiles: "Percentiles", form: str) -> list[str]:
    return [form.format(value) if percentiles.is_known else "–" for value in percentiles]
