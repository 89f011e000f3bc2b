"""The pictures of docs/benchmarks.md, as SVG files: those of `prefixmesh replay --report`, and one of the first tokens that a cache saves.

    python benchmarks/report_plots.py --trace conversation_trace.jsonl --out docs/img     # minutes; the trace: prefixmesh traces show conversation
    python benchmarks/report_plots.py --out docs/img                                      # those that need no trace

What is drawn is simulated and exact: the same code and the same matplotlib write the same files. Other fonts move nothing, since
text stays text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import click

from prefixmesh.bench.plot_svg import plain, scale_milliseconds, svg
from prefixmesh.bench.replay_report import plots_of
from prefixmesh.bench.replay_sweep import Run, sweep
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_profiles import read_profile
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workload_file import read_workload
from prefixmesh.sim.workloads.catalogue import make_workload

POLICIES = ("cost", "match_gate", "block_cost", "weighted_scores", "backlog", "round_robin")
TRACE_PLOTS = ("first_token", "by_room", "by_workers", "load")
ROOM_80_GB = 427_000
"""Tokens of KV beside 8 billion parameters on a card of 80 GB, nine tenths of it used."""

ROWS = {
    "agents": 500,
    "fork": 800,
    "tree-of-thought": 800,
    "rag": 500,
    "chat": 1500,
    "lora-tenants": 800,
    "all-unique": 600,
}
"""Requests of each workload, as in the table beside the picture."""

CACHE_COLOURS = {"radix": "#0072b2", "off": "#d55e00"}


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(trace: Path | None, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    pictures = [("where_a_cache_pays", where_a_cache_pays())]
    pictures += service_plots()
    if trace is not None:
        pictures += trace_plots(trace)
    for name, text in pictures:
        path = out / f"{name}.svg"
        path.write_text(text + "\n", encoding="utf-8")
        click.echo(f"{path}: {path.stat().st_size:,} bytes")


def trace_plots(path: Path) -> Iterator[tuple[str, str]]:
    """Of `prefixmesh replay conversation_trace.jsonl --report` with these policies."""
    workload = read_workload(path)
    spec = ReplaySpec(timing=read_profile("h100-8b").timing)
    runs = {name: Run(name, spec) for name in POLICIES}
    found = {name: replay(workload, spec, name) for name in POLICIES}
    for plot in plots_of(found, spec, sweep(workload, runs, found)):
        if plot.name in TRACE_PLOTS:
            yield f"conversation_{plot.name}", plot.svg


def service_plots() -> Iterator[tuple[str, str]]:
    """Of `prefixmesh replay customer-service --cache radix,hash,off --concurrency 512 --report` on one great worker."""
    workload = made("customer-service", requests=6000, block_size=8, concurrent=512)
    great = ReplaySpec(
        workers=1, device_tokens=1_400_000, timing=read_profile("h100x8-70b").timing, concurrency=512
    )
    found = by_cache(workload, great, ("radix", "hash", "off"))
    for plot in plots_of(found, great, None):
        if plot.name == "first_token":
            yield "service_first_token", plot.svg


def where_a_cache_pays() -> str:
    """First tokens with a cache and without one, a row a workload: from median to the slowest hundredth."""
    spec = ReplaySpec(device_tokens=ROOM_80_GB, timing=read_profile("h100-8b").timing)
    rows = {
        name: by_cache(made(name, requests=requests, block_size=8), spec, ("radix", "off"))
        for name, requests in ROWS.items()
    }

    def draw(figure: object) -> None:
        axes = figure.subplots()  # type: ignore[attr-defined]
        for place, found in enumerate(rows.values()):
            for shift, (cache, color) in zip((-0.13, 0.13), CACHE_COLOURS.items(), strict=True):
                ttft, y = found[cache].ttft_ms, place + shift
                axes.plot((ttft.p50, ttft.p99), (y, y), color=color, linewidth=2.5)
                axes.plot(ttft.p50, y, marker="o", color=color, label=cache if not place else None)
                axes.plot(ttft.p99, y, marker="|", markersize=9.0, color=color)
        axes.set_yticks(
            range(len(rows)),
            [f"{plain(name)}, {found['radix'].cached_share:.0%} cached" for name, found in rows.items()],
        )
        axes.invert_yaxis()
        all_of = [one.ttft_ms for found in rows.values() for one in found.values()]
        scale_milliseconds(axes, min(one.p50 for one in all_of), max(one.p99 for one in all_of))
        axes.set_xlabel("from arrival to first token: ● half wait longer, | 1 in 100 does")
        axes.legend(title="cache", frameon=False, loc="lower right")

    told = "; ".join(
        f"{name}: {found['radix'].ttft_ms.p50:.0f}, {found['off'].ttft_ms.p50:.0f}"
        for name, found in rows.items()
    )
    return svg("Where a cache pays", f"Median milliseconds with one and without: {told}", draw)


def by_cache(workload: Workload, spec: ReplaySpec, caches: tuple[str, ...]) -> dict[str, ReplayFigures]:
    from dataclasses import replace

    return {cache: replay(workload, replace(spec, cache=cache), "cost") for cache in caches}  # type: ignore[arg-type]


def made(name: str, **settings: int) -> Workload:
    given: Mapping[str, int] = settings
    return make_workload(name, Random(0).random, **given)


if __name__ == "__main__":
    main()
