"""The figures of a replay, for people and for machines."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

if TYPE_CHECKING:
    from prefixmesh.bench.replay_report import Page
    from prefixmesh.sim.replay_figures import ReplayFigures
    from prefixmesh.sim.replay_spec import ReplaySpec
    from prefixmesh.sim.workload import Workload

LEGEND: Final = """
cached, host: share of all prompt tokens that were found cached, and that came back from the host tier. ttft: from arrival to first token.
token: from one token of an answer to its next. load, work: the most prompt tokens, and the most work, of a worker by the mean. copies: on how
many workers a block is that is on any. good: requests that met the objective, and how many of them a second. decision: median of this
machine's time for one of our router's. The block-level form: what it leaves out is told in docs/benchmarks.md."""


class Title(NamedTuple):
    """What was replayed on what. Of specs that differ in their caches only, the first."""

    workload: "Workload"
    spec: "ReplaySpec"
    profile: str
    profile_source: str


def print_figures(title: Title, found: Mapping[str, "ReplayFigures"]) -> None:
    """A title, a table with a row a policy, and what its columns mean."""
    from prefixmesh.cli.tables import print_table

    click.echo(f"{about(title)}\n")
    print_table(_columns(title.spec), [_row(name, figures, title.spec) for name, figures in found.items()])
    click.echo(LEGEND)


def as_page(title: Title, found: Mapping[str, "ReplayFigures"]) -> "Page":
    """The same for a report."""
    from prefixmesh.bench.replay_report import Page

    rows = [_row(name, figures, title.spec) for name, figures in found.items()]
    command = shlex.join(("prefixmesh", *sys.argv[1:]))
    return Page(f"Replay: {title.workload.name}", about(title), _columns(title.spec), rows, LEGEND, command)


def about(title: Title) -> str:
    """What was replayed on what, in a line."""
    workload, spec = title.workload, title.spec
    way = (
        f"{spec.concurrency:,} conversations at a time"
        if spec.concurrency
        else f"at its times, speed {spec.speed:g}"
    )
    return (
        f"{workload.name}: {len(workload.requests):,} requests, {workload.prompt_tokens:,} prompt tokens in blocks of "
        f"{workload.block_size}, {way}; {spec.workers:,} workers of {spec.device_tokens:,} tokens on the device and "
        f"{spec.host_tokens:,} on the host; {title.profile} ({title.profile_source}){_objective(spec)}"
    )


def as_object(title: Title, found: Mapping[str, "ReplayFigures"]) -> dict[str, Any]:
    """The same for JSON; names of fields stay."""
    from dataclasses import asdict

    workload, fleet = title.workload, asdict(title.spec)
    ttft_ms, token_ms = title.spec.objective
    fleet["objective"] = {
        "ttft_ms": ttft_ms if math.isfinite(ttft_ms) else None,
        "token_ms": token_ms if math.isfinite(token_ms) else None,
    }
    return {
        "form": "block-level",
        "trace": {
            "name": workload.name,
            "block_size": workload.block_size,
            "requests": len(workload.requests),
        },
        "fleet": fleet | {"profile": title.profile, "profile_source": title.profile_source},
        "policies": {name: figures.as_json() for name, figures in found.items()},
    }


def _columns(spec: "ReplaySpec") -> Sequence[str]:
    columns = ("policy", "cached", "host", "ttft p50", "p90", "p99 ms", "token p50", "p99 ms")
    goodput = ("good", "a second") if _has_objective(spec) else ()
    return (*columns, "tokens/s", "load", "work", "copies", *goodput, "decision")


def _row(name: str, figures: "ReplayFigures", spec: "ReplaySpec") -> Sequence[str]:
    ttft, token = figures.ttft_ms, figures.token_ms
    goodput = (
        (f"{figures.goodput_share:.1%}", f"{figures.goodput_per_s:,.1f}") if _has_objective(spec) else ()
    )
    return (
        name,
        f"{figures.cached_share:.2%}",
        f"{figures.host_share:.2%}",
        f"{ttft.p50:,.0f}",
        f"{ttft.p90:,.0f}",
        f"{ttft.p99:,.0f}",
        f"{token.p50:,.1f}",
        f"{token.p99:,.1f}",
        f"{figures.tokens_per_s:,.0f}",
        f"{figures.max_over_mean:.2f}",
        f"{figures.work_max_over_mean:.2f}",
        f"{figures.copies:.2f}",
        *goodput,
        "" if figures.decision_us is None else f"{figures.decision_us.p50:,.0f} µs",
    )


def _has_objective(spec: "ReplaySpec") -> bool:
    return any(map(math.isfinite, spec.objective))


def _objective(spec: "ReplaySpec") -> str:
    wanted = [
        f"{what} within {milliseconds:g} ms"
        for what, milliseconds in zip(("the first token", "each token"), spec.objective, strict=True)
        if math.isfinite(milliseconds)
    ]
    return f"; objective: {' and '.join(wanted)}" if wanted else ""
