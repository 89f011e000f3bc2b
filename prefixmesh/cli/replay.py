"""``prefixmesh replay``: a trace through a simulated fleet by one routing policy or several, and what came of it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.replay_faults import FaultCommand, print_script, run_faults
from prefixmesh.cli.replay_flags import refuse_unheard
from prefixmesh.cli.replay_table import Title, as_object, as_page, print_figures

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from prefixmesh.bench.replay_sweep import Run
    from prefixmesh.sim.replay_figures import ReplayFigures
    from prefixmesh.sim.replay_spec import ReplaySpec
    from prefixmesh.sim.workload import Workload

ALL: Final = "all"
OURS: Final = "cost"
DEFAULT_POLICIES: Final = (OURS, "match_gate", "block_cost", "weighted_scores", "round_robin")
"""Ours, the published rules of others, and what knows nothing."""


@click.command(short_help="Replay a trace by routing policies, in simulated time.")
@click.argument("trace", metavar="TRACE")
@click.option("--workers", type=int, default=8, show_default=True, help="How many.")
@click.option(
    "--routers",
    type=int,
    default=1,
    show_default=True,
    help="Of ours, that share the requests; others' rules are one.",
)
@click.option("--device-tokens", type=int, default=2_000_000, show_default=True, help="Each worker's cache.")
@click.option("--host-tokens", type=int, default=0, show_default=True, help="Each worker's host tier.")
@click.option(
    "--cache",
    "caches",
    help="What workers keep: radix, hash (whole blocks of 16 tokens), off; several with commas are compared.  [default: radix]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help=f"Which policy, or {ALL}, which has {OURS} on the other caches too; may be repeated.  [default: {', '.join(DEFAULT_POLICIES)}]",
)
@click.option(
    "--profile", default="h100-8b", show_default=True, help="How fast workers are: a name, or a JSON file."
)
@click.option("--spill-weight", type=float, help="λ of the policy cost; the router's own where not given.")
@click.option(
    "--speed", type=float, default=1.0, show_default=True, help="Requests arrive so many times faster."
)
@click.option(
    "--concurrency",
    type=int,
    default=0,
    help="So many conversations at a time, the next when one ends, whatever the trace's times; 0: by its times.",
)
@click.option(
    "--max-running", type=int, default=0, help="Most requests in a worker's batch; 0: as many as fit."
)
@click.option(
    "--max-resident-adapters",
    type=int,
    default=8,
    show_default=True,
    help="LoRA adapters in each worker's memory; 0: all of the trace's, and none is ever loaded.",
)
@click.option(
    "--pins/--no-pins",
    default=False,
    help="Keep what requests want pinned from the beginning, on as many workers as they say.  [default: nothing is pinned]",
)
@click.option(
    "--cascade/--no-cascade",
    default=False,
    help="Read KV that several who decode share once a step, as the engine does, or for each.  [default: for each]",
)
@click.option("--slo-ttft-ms", type=float, help="Objective that goodput counts by: the first token, at most.")
@click.option("--slo-tpot-ms", type=float, help="The same of the time from token to token.")
@click.option(
    "--at-once", is_flag=True, help="Count as studies by blocks do: caches change as requests are sent."
)
@click.option("--requests", type=int, help="About so many, of a workload that is named.")
@click.option("--block-size", type=int, help="Tokens that its blocks have.  [default: 64]")
@click.option(
    "--faults",
    metavar="KINDS|FILE",
    help="Another form: for each seed a piece of the trace, made small, through a fleet of a few workers in which much goes wrong, over a "
    "network, and then what must hold. Fleet, policy and profile are the seed's. mixed, or some of crashes, stalls, lies, refusals, copies, "
    "partitions, network, store, with commas; or a script in JSON.",
)
@click.option("--seeds", type=int, default=1, show_default=True, help="How many of those, from --seed on.")
@click.option("--jobs", type=int, default=1, show_default=True, help="By so many processes.")
@click.option(
    "--print-script",
    "prints_script",
    is_flag=True,
    help="Print what goes wrong in --seed, as a script in JSON.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of policies and workloads that draw.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page of HTML with plots; needs prefixmesh[report].",
)
@click.option(
    "--sweep/--no-sweep",
    default=True,
    help="For the report, replay with other rooms and numbers of workers too: eight runs more of each.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    *,
    trace: str,
    caches: str | None,
    policies: tuple[str, ...],
    profile: str,
    spill_weight: float | None,
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    requests: int | None,
    block_size: int | None,
    report: Path | None,
    faults: str | None,
    seeds: int,
    jobs: int,
    prints_script: bool,
    sweep: bool,
    as_json: bool,
    seed: int,
    **fleet: Any,
) -> None:
    """Send the requests of TRACE to simulated workers by each policy, and compare what they found cached and how long they waited.

    TRACE is a file in the Mooncake format, one that `prefixmesh traces make` wrote, or the name of a workload.
    """
    from prefixmesh.sim.replay_cascade import cascade_min_reads
    from prefixmesh.sim.replay_figures import Objective
    from prefixmesh.sim.replay_profiles import read_profile
    from prefixmesh.sim.replay_spec import POLICIES, ReplaySpec

    refuse_unheard(click.get_current_context())
    made = {"requests": requests, "block_size": block_size}
    if faults is not None:
        asked = FaultCommand(
            trace=trace, faults=faults, seed=seed, seeds=seeds, jobs=jobs, made=made, as_json=as_json
        )
        if prints_script:
            print_script(asked)
        else:
            # One workload for all seeds, each of which can be run again alone.
            run_faults(asked, partial(read_trace_or_workload, trace, 0, made))
        return
    if prints_script or (seeds, jobs) != (1, 1):
        raise click.UsageError("--seeds, --jobs and --print-script are of --faults")
    if report is not None:
        from prefixmesh.bench.plot_svg import require_matplotlib

        require_matplotlib()  # sooner than after a long run
    names = POLICIES if ALL in policies else tuple(dict.fromkeys(policies)) or DEFAULT_POLICIES
    _refuse_unknown(names, POLICIES)
    given = {"ttft_ms": slo_ttft_ms, "token_ms": slo_tpot_ms}
    weight: dict[str, Any] = {} if spill_weight is None else {"spill_weight": spill_weight}
    speeds = read_profile(profile)
    objective = Objective(**{name: value for name, value in given.items() if value is not None})
    fleet |= {"timing": speeds.timing, "seed": seed, "objective": objective, **weight}
    fleet["cascade_min_reads"] = cascade_min_reads(speeds.kv_heads)
    kinds: Sequence[Any] = tuple(dict.fromkeys(kind.strip() for kind in (caches or "radix").split(",")))
    specs = [ReplaySpec(cache=kind, **fleet) for kind in kinds]
    workload = read_trace_or_workload(trace, seed, made | {"concurrent": _customers(trace, specs[0])})
    runs = _runs(specs, names)
    if caches is None and ALL in policies:
        runs |= _with_other_caches(specs[0])
    found = _run(workload, runs)
    title = Title(workload, specs[0], profile, speeds.source)
    if report is not None:
        _write_report(report, title, runs, found, is_swept=sweep)
    if as_json:
        click.echo(json.dumps(as_object(title, found), indent=2, allow_nan=False))
    else:
        print_figures(title, found)


def _refuse_unknown(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"{name!r} is not one of {', '.join((*known, ALL))}", param_hint="--policy"
            )


def read_trace_or_workload(trace: str, seed: int, asked: "Mapping[str, int | None]") -> "Workload":
    """A file's workload, or one by its name, with the settings of its generator that were asked for."""
    from random import Random

    from prefixmesh.errors import ConfigError
    from prefixmesh.sim.workload_file import is_there, read_workload
    from prefixmesh.sim.workloads.catalogue import GENERATORS, make_workload

    made = {name: value for name, value in asked.items() if value is not None}
    if is_there(trace):
        if made:
            raise ConfigError(f"{', '.join(made)}: a file has the requests and blocks that it has")
        return read_workload(Path(trace))
    if trace in GENERATORS:
        return make_workload(trace, Random(seed).random, **made)  # noqa: S311  chance to repeat, not to hide
    raise ConfigError(f"trace: {trace!r} is neither a file nor one of {', '.join(GENERATORS)}")


def _customers(trace: str, spec: "ReplaySpec") -> int | None:
    """Of a workload that is a closed loop itself: it has so many customers, each of whom follows another."""
    return spec.concurrency or None if trace == "customer-service" and not Path(trace).exists() else None


def _runs(specs: "Sequence[ReplaySpec]", names: Sequence[str]) -> "dict[str, Run]":
    """By the name of the policy, and where caches are compared of the cache as well: ``cost/hash``."""
    from prefixmesh.bench.replay_sweep import Run

    return {
        name if len(specs) == 1 else f"{name}/{spec.cache}": Run(name, spec)
        for name in names
        for spec in specs
    }


def _with_other_caches(spec: "ReplaySpec") -> "dict[str, Run]":
    """Ours on what a tree of prefixes is measured against."""
    from dataclasses import replace

    from prefixmesh.bench.replay_sweep import Run
    from prefixmesh.sim.replay_cache import CACHE_KINDS

    kinds = [kind for kind in CACHE_KINDS if kind != spec.cache]
    return {f"{OURS}/{kind}": Run(OURS, replace(spec, cache=kind)) for kind in kinds}


def _run(workload: "Workload", runs: "Mapping[str, Run]") -> dict[str, "ReplayFigures"]:
    from prefixmesh.sim.replay import replay as run

    found = {}
    with _progress(list(runs), len(workload.requests)) as show:
        for label, (policy, spec) in runs.items():
            found[label] = run(workload, spec, policy, show and show(label))
    return found


def _write_report(
    path: Path,
    title: Title,
    runs: "Mapping[str, Run]",
    found: "Mapping[str, ReplayFigures]",
    *,
    is_swept: bool,
) -> None:
    from prefixmesh.bench.replay_report import plots_of, report_html
    from prefixmesh.bench.replay_sweep import sweep
    from prefixmesh.errors import ConfigError

    def tell(what: str) -> None:
        click.echo(f"\x1b[2Kreport: {what}\r", nl=False, err=True)

    is_shown = sys.stderr.isatty()
    sizes = sweep(title.workload, runs, found, tell if is_shown else None) if is_swept else None
    html = report_html(as_page(title, found), plots_of(found, title.spec, sizes))
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report {path}: {error.strerror}") from error
    click.echo(f"{path}: {path.stat().st_size:,} bytes", err=True)


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
