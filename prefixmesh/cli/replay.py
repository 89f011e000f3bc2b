"""``prefixmesh replay``: a trace through a simulated fleet by one routing policy or several, and what came of it."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from prefixmesh.sim.replay import ReplaySpec
    from prefixmesh.sim.replay_figures import ReplayFigures
    from prefixmesh.sim.workload import Workload

ALL: Final = "all"
DEFAULT_POLICIES: Final = ("cost", "match_gate", "block_cost", "weighted_scores", "round_robin")
"""Ours, the published rules of others, and what knows nothing."""

LEGEND: Final = """
cached, host: share of all prompt tokens that were found cached, and that came back from the host tier. ttft: from arrival to first token.
token: from one token of an answer to its next. load, work: the most prompt tokens, and the most work, of a worker by the mean. copies: on how
many workers a block is that is on any. The block-level form: what it leaves out is told in docs/benchmarks.md."""


@click.command(short_help="Replay a trace by routing policies, in simulated time.")
@click.argument("trace", metavar="TRACE")
@click.option("--workers", type=int, default=8, show_default=True, help="How many.")
@click.option("--device-tokens", type=int, default=2_000_000, show_default=True, help="Each worker's cache.")
@click.option("--host-tokens", type=int, default=0, show_default=True, help="Each worker's host tier.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help=f"Which policy, or {ALL}; may be repeated.  [default: {', '.join(DEFAULT_POLICIES)}]",
)
@click.option(
    "--profile", default="h100-8b", show_default=True, help="How fast workers are: a name, or a JSON file."
)
@click.option("--spill-weight", type=float, help="λ of the policy cost; the router's own where not given.")
@click.option(
    "--speed", type=float, default=1.0, show_default=True, help="Requests arrive so many times faster."
)
@click.option(
    "--at-once", is_flag=True, help="Count as studies by blocks do: caches change as requests are sent."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of policies and workloads that draw.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    *,
    trace: str,
    policies: tuple[str, ...],
    profile: str,
    spill_weight: float | None,
    as_json: bool,
    seed: int,
    **fleet: Any,
) -> None:
    """Send the requests of TRACE to simulated workers by each policy, and compare what they found cached and how long they waited.

    TRACE is a file in the Mooncake format, one that `prefixmesh traces make` wrote, or the name of a workload.
    """
    from prefixmesh.sim.replay import POLICIES, ReplaySpec
    from prefixmesh.sim.replay_profiles import read_profile

    names = POLICIES if ALL in policies else tuple(dict.fromkeys(policies)) or DEFAULT_POLICIES
    weight: dict[str, Any] = {} if spill_weight is None else {"spill_weight": spill_weight}
    speeds = read_profile(profile)
    spec = ReplaySpec(timing=speeds.timing, seed=seed, **fleet, **weight)
    _refuse_unknown(names, POLICIES)
    workload = _workload(trace, seed)
    found = _run(workload, spec, names)
    if as_json:
        click.echo(json.dumps(_as_json(workload, spec, profile, speeds.source, found), indent=2))
    else:
        _print(workload, spec, f"{profile} ({speeds.source})", found)


def _refuse_unknown(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"{name!r} is not one of {', '.join((*known, ALL))}", param_hint="--policy"
            )


def _workload(trace: str, seed: int) -> "Workload":
    from random import Random

    from prefixmesh.errors import ConfigError
    from prefixmesh.sim.workload_file import read_workload
    from prefixmesh.sim.workloads.catalogue import GENERATORS, make_workload

    if Path(trace).exists():
        return read_workload(Path(trace))
    if trace in GENERATORS:
        return make_workload(trace, Random(seed).random)  # noqa: S311  chance to repeat, not to hide
    raise ConfigError(f"trace: {trace!r} is neither a file nor one of {', '.join(GENERATORS)}")


def _run(workload: "Workload", spec: "ReplaySpec", names: Sequence[str]) -> dict[str, "ReplayFigures"]:
    from prefixmesh.sim.replay import replay as run

    found = {}
    with _progress(names, len(workload.requests)) as show:
        for name in names:
            found[name] = run(workload, spec, name, show and show(name))
    return found


def _progress(
    names: Sequence[str], requests: int
) -> "AbstractContextManager[Callable[[str], Callable[[int], None]] | None]":
    """One bar over all policies on stderr; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        return nullcontext(None)
    return _Bar(names, requests)


class _Bar:
    """Progress of several replays, one after the other."""

    def __init__(self, names: Sequence[str], requests: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._names = list(names)
        self._requests = requests
        self._bar = Progress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> Callable[[str], Callable[[int], None]]:
        self._bar.start()
        self._task = self._bar.add_task("", total=len(self._names) * self._requests)
        return self._showing

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _showing(self, name: str) -> Callable[[int], None]:
        before = self._names.index(name) * self._requests
        return lambda done: self._bar.update(self._task, description=name, completed=before + done)


def _print(workload: "Workload", spec: "ReplaySpec", profile: str, found: dict[str, "ReplayFigures"]) -> None:
    from prefixmesh.cli.tables import print_table

    click.echo(
        f"{workload.name}: {len(workload.requests):,} requests, {workload.prompt_tokens:,} prompt tokens; {spec.workers} workers of "
        f"{spec.device_tokens:,} tokens on the device and {spec.host_tokens:,} on the host; {profile}\n"
    )
    columns = ("policy", "cached", "host", "ttft p50", "p90", "p99 ms", "token p50", "p99 ms")
    print_table((*columns, "load", "work", "copies", "tokens/s"), [_row(*one) for one in found.items()])
    click.echo(LEGEND)


def _row(name: str, figures: "ReplayFigures") -> Sequence[str]:
    ttft, token = figures.ttft_ms, figures.token_ms
    return (
        name,
        f"{figures.cached_share:.2%}",
        f"{figures.host_share:.2%}",
        f"{ttft.p50:,.0f}",
        f"{ttft.p90:,.0f}",
        f"{ttft.p99:,.0f}",
        f"{token.p50:,.1f}",
        f"{token.p99:,.1f}",
        f"{figures.max_over_mean:.2f}",
        f"{figures.work_max_over_mean:.2f}",
        f"{figures.copies:.2f}",
        f"{figures.tokens_per_s:,.0f}",
    )


def _as_json(
    workload: "Workload",
    spec: "ReplaySpec",
    profile: str,
    source: str,
    found: dict[str, "ReplayFigures"],
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "form": "block-level",
        "trace": {
            "name": workload.name,
            "block_size": workload.block_size,
            "requests": len(workload.requests),
        },
        "fleet": asdict(spec) | {"profile": profile, "profile_source": source},
        "policies": {name: figures.as_json() for name, figures in found.items()},
    }
