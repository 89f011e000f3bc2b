"""``prefixmesh bench engine``: how fast one worker's engine is on this machine, and whether that is what was asked for."""

import dataclasses
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from prefixmesh.cli.bench_table import (
    amount,
    bench_flags,
    print_table,
    refuse_quick_check,
    unjudged,
    verdict,
)
from prefixmesh.cli.terminal import print_note

if TYPE_CHECKING:
    from rich.text import Text

    from prefixmesh.bench.engine_figures import Ceiling, Others, Report, Result, SavingsPoint

LEGEND: Final = """
cache off: the same with --prefix-cache off, in turns with it. ceiling: the share of this machine's product or read that was reached.
scaled: the target times what the machine of the targets is faster (first tokens and the burst by the product, decoding by the
read, the loop by Python's yardstick).
others, on the machine of the targets: vLLM's CPU build (without prefix cache) / transformers.
The engine runs in this process, as in its own: no gRPC and no socket is in a figure. The loop's cost is a step less forward."""


def _known() -> Collection[str]:
    from prefixmesh.bench.engine_plan import PARTS

    return PARTS


@click.command(short_help="Measure the engine: first tokens, decoding, a burst, the loop.")
@bench_flags(_known, one_of_them="part", quick="Small prompts")
@click.option(
    "--processor-time",
    is_flag=True,
    help="One thread, and its processor time: for machines that others use. No figure to hold to a target.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw what --only savings found as an SVG.",
)
def engine(
    *, as_json: bool, check: bool, quick: bool, names: frozenset[str], processor_time: bool, plot: Path | None
) -> None:
    """Measure SmolLM2-135M in bfloat16 on all cores, with the engine's defaults, in some minutes.

    Targets were set on one machine, and are scaled to this one by what it can do beside each figure: a bfloat16 product of
    1,500 x 576 x 3,072 (411 GFLOP/s there), a read of as many bytes as the weights have, and Python's yardstick. Run it where nothing
    else runs. ``--only savings`` measures first tokens of a prompt of which ever more is cached.
    """
    if plot is not None and "savings" not in names:
        raise click.UsageError("--plot draws what --only savings finds")
    if check and processor_time:
        raise click.UsageError("--check holds times of all cores to targets, --processor-time takes others")
    refuse_quick_check(check=check, quick=quick)
    report = _measure(names, quick=quick, processor_time=processor_time)
    if quick:
        report = dataclasses.replace(report, results=unjudged(report.results))
    if as_json:
        from prefixmesh.bench.engine_figures import as_json as to_json

        click.echo(json.dumps(to_json(report), indent=2))
    else:
        _print_report(report, quick=quick)
    if plot is not None:
        from prefixmesh.bench.engine_plot import savings_svg

        plot.write_text(savings_svg(report.savings))
    if check and report.missed:
        missed = ", ".join(one.figure.name for one in report.missed)
        judged = sum(result.met is not None for result in report.results)
        raise click.ClickException(f"{len(report.missed)} of {judged} figures missed: {missed}")


def _measure(names: frozenset[str], *, quick: bool, processor_time: bool) -> "Report":
    from prefixmesh.worker.process_engine import ENGINE_ENVIRONMENT

    for name, value in ENGINE_ENVIRONMENT.items():  # before torch is loaded, as in an engine's process
        os.environ.setdefault(name, value)
    from prefixmesh.bench.engine_bench import run_engine_bench
    from prefixmesh.bench.engine_ceiling import CeilingMeter
    from prefixmesh.bench.engine_models import BENCH_CONFIG, open_engines
    from prefixmesh.bench.engine_plan import FULL, QUICK

    config = dataclasses.replace(BENCH_CONFIG, threads=1) if processor_time else BENCH_CONFIG
    clock = time.thread_time if processor_time else time.perf_counter
    engines = open_engines(config, print_note, clock)
    return run_engine_bench(QUICK if quick else FULL, engines, CeilingMeter(clock).measure, names, print_note)


def _print_report(report: "Report", *, quick: bool) -> None:
    setup = report.setup
    versions = ", ".join(f"{name} {number}" for name, number in setup.versions.items())
    click.echo(f"{setup.model} in {setup.dtype}, {setup.threads} threads on {setup.cores} cores · {versions}")
    click.echo(f"this machine: {_ceiling_text(report.ceiling)}")
    if quick:
        click.echo("quick: small prompts and few repeats; these figures are no measure of anything")
    if report.results:
        names = (
            "figure",
            "median",
            "least",
            "most",
            "cache off",
            "ceiling",
            "target",
            "scaled",
            "",
            "others",
        )
        print_table(names, ("figure", "", "others"), [_row(result) for result in report.results])
        click.echo(LEGEND)
    for result in report.results:
        if result.notes:
            seen = ", ".join(
                f"{name.replace('_', ' ')} {amount(value)}" for name, value in result.notes.items()
            )
            click.echo(f"{result.figure.title.strip()}: {seen}")
    if report.savings:
        columns = (
            "prompt",
            "cached",
            "first token",
            "of cold",
            "compute left",
            "linear left",
            "attention left",
        )
        whole = report.savings[0]
        print_table(columns, (), [_savings_row(point, whole) for point in report.savings])


def _ceiling_text(ceiling: "Ceiling") -> str:
    from prefixmesh.bench.engine_figures import PRODUCT_REFERENCE, READ_REFERENCE

    return (
        f"product {ceiling.product_flops_per_s / 1e9:.0f} GFLOP/s (machine of the targets: {PRODUCT_REFERENCE / 1e9:.0f}), "
        f"read {ceiling.read_bytes_per_s / 1e9:.1f} GB/s ({READ_REFERENCE / 1e9:.0f}), "
        f"Python {ceiling.yardstick.scale:.2f} × as slow"
    )


def _row(result: "Result") -> "list[str | Text]":
    figure = result.figure
    return [
        figure.title,
        f"{amount(result.value)} {figure.unit}",
        amount(min(result.values)),
        amount(max(result.values)),
        amount(result.value_cache_off),
        "" if result.reached is None else f"{result.reached:.0%}",
        amount(figure.target),
        amount(result.scaled_target),
        verdict(result.met),
        _others_text(figure.others),
    ]


def _others_text(others: "Others") -> str:
    if others.vllm_cpu is None:
        return ""
    least, most = others.vllm_cpu
    vllm = f"{least:g}" if least == most else f"{least:g} to {most:g}"
    off = "" if others.vllm_cpu_cache_off is None else f" ({others.vllm_cpu_cache_off:g})"
    return f"{vllm}{off}" + ("" if others.transformers is None else f" / {others.transformers:g}")


def _savings_row(point: "SavingsPoint", whole: "SavingsPoint") -> list[str]:
    return [
        f"{point.prompt_tokens:,}",
        f"{point.cached_tokens:,}",
        f"{point.value:.3f} s",
        *(
            f"{share:.1%}"
            for share in (
                point.value / whole.value,
                point.total_left,
                point.linear_left,
                point.attention_left,
            )
        ),
    ]
