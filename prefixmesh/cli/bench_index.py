"""``prefixmesh bench index``: how fast the router's index and decision are on this machine, and whether that is what was asked for."""

from collections.abc import Collection
from typing import Final

import click

from prefixmesh.cli.bench_router_table import show
from prefixmesh.cli.bench_table import bench_flags, refuse_quick_check
from prefixmesh.cli.terminal import print_note

LEGEND: Final = """
blocks are of 64 tokens, each counted once however many workers hold it. scale: how much slower than the machine of the targets this one
was beside the figure; a target is scaled by it (but for bytes).
below: medians of the three parts of a decision; a compiled index of others finds 256 blocks in 19 to 25 µs and takes 160 to 194 bytes for a
block of 16 tokens, its selection of a worker 370 to 515 µs."""


def _known() -> Collection[str]:
    from prefixmesh.bench.index_plan import NAMES

    return NAMES


@click.command(short_help="Measure the router's index and decision: times, events, memory, pauses.")
@bench_flags(_known, one_of_them="figure", quick="Small fleets")
def index(*, as_json: bool, check: bool, quick: bool, names: frozenset[str]) -> None:
    """Measure what a router does for a prompt before it sends anything, and what it does with its workers' news, in some minutes.

    Targets were set on one machine, and are scaled to this one by what two things take here, measured beside each figure:
    comparing two equal 12 KiB objects (220 ns there) and calling an empty method (26 ns there). Run it where nothing else runs.
    """
    from prefixmesh.bench.index_bench import run_index_bench
    from prefixmesh.bench.index_plan import FULL, QUICK

    refuse_quick_check(check=check, quick=quick)
    report = run_index_bench(QUICK if quick else FULL, names, print_note)
    show(report, as_json=as_json, check=check, quick=quick, legend=LEGEND)
